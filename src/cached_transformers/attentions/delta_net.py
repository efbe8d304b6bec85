"""The Delta Network (Schlag, Irie and Schmidhuber 2021, arXiv:2102.11174; github.com/IDSIA/lmtool-fwp), in the chunked
form of Yang et al. 2024 (arXiv:2406.06484; github.com/fla-org/flash-linear-attention).

A fast weight matrix is corrected at each token: what its key retrieves now moves towards its value, by a share beta.

    S_t = S_{t-1} + phi(k_t) beta_t (v_t - S_{t-1}^T phi(k_t))^T,   out_t = S_t^T phi(q_t),   beta_t = sigmoid(W x_t)

    phi = "dpfp": y = [relu(x), relu(-x)], all products y_a y_{a-j} for j = 1 .. order; divided by their sum
          "elu":  elu(x) + 1, divided by its sum
          "silu": x sigmoid(x), divided by its length (of later work)

Within a chunk of C tokens, all corrections solve one triangular system: with K, Q, V of the chunk, A the part of
diag(beta) K K^T below the diagonal, and S the state before it,

    (I + A) [U, W] = diag(beta) [V, K],   X = U - W S,   out = Q S + tril(Q K^T) X,   S <- S + K^T X

U and W of all chunks are found at once; only S is carried from one to the next. A context is a sum of phi(k) v^T in the
state before the first token.

Cost, in multiply-adds a head: N (C (2 F + V) + 3 F V), and N C (F + V) / 2 for the triangular systems, F = 2 order E
(dpfp) or E; N D for beta; a context adds M F V. State: F V numbers a head. Parameters: D a head.

What differs from the original implementation: the output is not divided by sqrt(E), which the output projection can do.
As there, no normaliser divides it. The sum that divides features is kept above 1e-5, so that features of 0 (dpfp) stay
0. Every phi has length at most 1, without which the state could grow without bound.

Legend: B rows, H heads, N tokens, M keys of a context, D model width, E key width, V value width, F features, Q chunks,
C tokens of a chunk.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.checks import at_least_one
from cached_transformers.registry import ATTENTIONS
from cached_transformers.state import State

from .parts.kernels import fla_scan, takes_fla
from .parts.linearised import LinearisedAttention, elu_features, head_weights, hidden
from .parts.scan import causal_scan
from .parts.sizes import head_width


@ATTENTIONS.register(
    "delta_net",
    paper="arXiv:2102.11174",
    title="Delta Net",
    purpose="a state of fixed size, linear in N",
    equation="S_t = S_(t-1) + phi(k_t) beta_t (v_t - S_(t-1)^T phi(k_t))^T,  out_t = S_t^T phi(q_t)",
    order="N",
    cost="N (C (5 F + 3 E) / 2 + 3 F E + D) multiply-adds a head for F features (2 E with dpfp), in chunks of C tokens",
)
class DeltaNet(LinearisedAttention):
    """A fast weight memory that corrects, at each token, what its key retrieves.

    Args:
        width: D. heads: H.
        features: phi, one of "dpfp", "elu" and "silu".
        order: of dpfp: how many products each entry is in; 2 * order * E features.
        chunk: C, tokens that are taken at once; changes the cost alone.
        carry: the state goes on from segment to segment; see `LinearisedAttention`.
        kernel: "plain" or "fla" (flash-linear-attention, on a GPU, which rounds features and values to bfloat16: it is
            not taken unless it is asked for).

    Raises:
        ValueError: width is no multiple of heads, unknown features, an order or a chunk that cannot be.
    """

    can = frozenset({"causal", "context", "exact_padding"})

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        features: Literal["dpfp", "elu", "silu"] = "dpfp",
        order: int = 1,
        chunk: int = 64,
        carry: bool = False,
        kernel: Literal["plain", "fla"] = "plain",
    ) -> None:
        super().__init__(carry=carry)
        self.kernel = kernel
        size = head_width(width, heads)
        if features != "dpfp" and order != 1:
            raise ValueError(f'order={order} is an option of features="dpfp", and has no meaning for {features!r}')
        if not 1 <= order < 2 * size:
            raise ValueError(
                f"order={order} must be at least 1 and less than {2 * size}, twice the key width: there are "
                "no further products"
            )
        at_least_one(chunk=chunk)
        self.kind, self.order, self.chunk = features, order, chunk
        self.share = nn.Linear(width, heads, bias=False)

    def features(self, x_BHNE: Tensor, maps: Tensor | None) -> Tensor:
        if self.kind == "silu":
            return F.normalize(F.silu(x_BHNE), dim=-1)
        if self.kind == "elu":
            features = elu_features(x_BHNE)
        else:
            y = torch.cat([x_BHNE.relu(), (-x_BHNE).relu()], -1)
            features = torch.cat([y * y.roll(shift, -1) for shift in range(1, self.order + 1)], -1)
        return features / features.sum(-1, keepdim=True).clamp(min=1e-5)

    def empty(self, rows: int, heads: int, width: int, value_width: int, like: Tensor) -> Tensor:
        count = 2 * self.order * width if self.kind == "dpfp" else width
        return like.new_zeros(rows, heads, count, value_width)

    def run(
        self, q_BHNF: Tensor, k_BHNF: Tensor, v_BHNV: Tensor, state: State, seen_BN: Tensor | None, x_BND: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        beta_BHN1 = torch.sigmoid(head_weights(self.share, x_BND, "beta of delta_net"))[..., None]
        beta_BHN1 = hidden(beta_BHN1, seen_BN)
        if takes_fla(self.kernel, q_BHNF):
            return fla_scan(q_BHNF, k_BHNF, v_BHNV, state, beta_BHN1=beta_BHN1)
        return causal_scan(q_BHNF, k_BHNF, v_BHNV, state, beta_BHN1=beta_BHN1, chunk=self.chunk)
