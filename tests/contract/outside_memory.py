"""A third-party memory in one file outside the package: Infini-attention (arXiv:2404.07143).

Beside its attention each head keeps a matrix M of what all earlier segments said, and a gate mixes what it answers in:

    A_mem = s(Q) M / (s(Q) z),   A = g A_mem + (1 - g) A_dot,   s(x) = elu(x) + 1,   g = sigmoid(beta), one a head
    M' = M + s(K)^T V,   z' = z + sum s(K);   delta rule: V - s(K) M / (s(K) z) in the place of V

Legend: B rows, N tokens, H heads, E head width, F a second E.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from cached_transformers.interfaces.memory import LayerMemory, ProjectKV, Query, Reading, Trace
from cached_transformers.registry import MEMORIES


class Associations(NamedTuple):
    """M, z, and how many tokens the row has written; before the first one neither means anything."""

    matrix_BHEF: Tensor
    norm_BHE: Tensor
    tokens_B: Tensor


@MEMORIES.register(
    "outside_infini",
    paper="arXiv:2404.07143",
    equations="A = g s(Q) M / (s(Q) z) + (1 - g) softmax(Q K^T) V;  M' = M + s(K)^T V;  z' = z + sum s(K)",
    state="per row and layer: 4 (D E + D) + 8 bytes",
    cost="per token and layer: 2 D E multiply-adds",
    reach="unbounded; what fits into H matrices of E x E",
    gradient="through the matrix, over `bptt` segments",
)
class OutsideInfini(LayerMemory):
    """A matrix per head, to which each segment adds its keys and values.

    Args:
        width: D. heads: H.
        delta: write what the matrix does not answer already, instead of all.
        initial_gate: beta.
    """

    needs = frozenset({"state", "head"})

    def __init__(self, width: int, heads: int, delta: bool = False, initial_gate: float = 0.0) -> None:
        super().__init__()
        self.heads, self.head_width, self.delta = heads, width // heads, delta
        self.gate_H = nn.Parameter(torch.full((heads,), float(initial_gate)))

    def init_state(self, batch_size: int, like: Tensor) -> Associations:
        matrix_BHEF = like.new_zeros(batch_size, self.heads, self.head_width, self.head_width)
        return Associations(matrix_BHEF, matrix_BHEF[..., 0].clone(), like.new_zeros(batch_size, dtype=torch.long))

    def read(self, state: Associations, query: Query, project_kv: ProjectKV | None) -> Reading:
        assert query.q_BHNE is not None
        answer_BHNE = self._answer(query.q_BHNE, *self._written(state))
        return Reading(output_BHNE=answer_BHNE, carry=(state.tokens_B > 0)[:, None, None, None])

    def combine(self, y_BHNE: Tensor, query: Query, reading: Reading) -> Tensor:
        gate_H11 = self.gate_H.sigmoid()[:, None, None]
        mixed_BHNE = gate_H11 * reading.output_BHNE + (1 - gate_H11) * y_BHNE
        return torch.where(reading.carry, mixed_BHNE.to(y_BHNE.dtype), y_BHNE)

    def write(self, state: Associations, trace: Trace) -> tuple[Associations, None]:
        k_BHNE, v_BHNE, padding_BN = trace.query.k_BHNE, trace.query.v_BHNE, trace.query.padding_BN
        assert k_BHNE is not None and v_BHNE is not None
        matrix_BHEF, norm_BHE = self._written(state)
        if self.delta:
            answered_BHNE = self._answer(k_BHNE, matrix_BHEF, norm_BHE)
            v_BHNE = torch.where((state.tokens_B > 0)[:, None, None, None], v_BHNE - answered_BHNE, v_BHNE)
        s_BHNE = self._features(k_BHNE.to(norm_BHE.dtype)) / self.head_width  # cancels in A_mem, and keeps sums small
        tokens = torch.full_like(state.tokens_B, k_BHNE.shape[2])
        if padding_BN is not None:
            hidden_B1N1, tokens = padding_BN[:, None, :, None], (~padding_BN).sum(1)
            s_BHNE, v_BHNE = s_BHNE.masked_fill(hidden_B1N1, 0), v_BHNE.masked_fill(hidden_B1N1, 0)
        matrix_BHEF = matrix_BHEF + s_BHNE.mT @ v_BHNE.to(s_BHNE.dtype)
        norm_BHE = torch.where((state.tokens_B > 0)[:, None, None], norm_BHE, 0) + s_BHNE.sum(2)
        return Associations(matrix_BHEF, norm_BHE, state.tokens_B + tokens), None

    def close_gate(self) -> None:
        with torch.no_grad():
            self.gate_H.fill_(-torch.inf)

    @staticmethod
    def _written(state: Associations) -> tuple[Tensor, Tensor]:
        """M and z, with 0 and 1 in rows that have written nothing."""
        any_B11 = (state.tokens_B > 0)[:, None, None]
        return torch.where(any_B11[..., None], state.matrix_BHEF, 0), torch.where(any_B11, state.norm_BHE, 1)

    @staticmethod
    def _answer(asked_BHNE: Tensor, matrix_BHEF: Tensor, norm_BHE: Tensor) -> Tensor:
        s_BHNE = OutsideInfini._features(asked_BHNE.to(norm_BHE.dtype))
        return (s_BHNE @ matrix_BHEF) / (s_BHNE @ norm_BHE[..., None]).clamp(min=1e-6)  # where all features are 0, 0

    @staticmethod
    def _features(x: Tensor) -> Tensor:
        return torch.where(x > 0, x + 1, x.clamp(max=0).exp())  # elu(x) + 1, which would round to 0 below x = -17
