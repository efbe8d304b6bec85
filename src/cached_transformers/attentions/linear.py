"""The Linear Transformer (Katharopoulos et al. 2020, arXiv:2006.16236; github.com/idiap/fast-transformers).

    out_i = phi(q_i) sum_j phi(k_j) v_j^T / (phi(q_i) . sum_j phi(k_j) + epsilon),   phi(x) = elu(x) + 1   (eq. 5 to 7)
    causal: j <= i, by prefix sums (eq. 9 to 12)

Cost, in multiply-adds a head: 2 N E (V + 1); causal, with chunks of C tokens: N (C (E + V + 1) + 2 E (V + 1)); a
context adds M E (V + 1). State: E (V + 1) numbers a head. No parameters.

What differs from the original implementation: epsilon is 0 (there 1e-6), since the quotient is defined without it
wherever a key is seen, and with it outputs shrink where phi is small; elu(x) + 1 is computed as e^x below 0, where the
sum of (e^x - 1) and 1 has lost its digits. As there, queries are not scaled by 1 / sqrt(E).

Legend: B rows, H heads, N tokens, M keys of a context, E key width, V value width (with the normaliser: V + 1).
"""

from __future__ import annotations

from torch import Tensor

from cached_transformers.checks import at_least_one
from cached_transformers.registry import ATTENTIONS
from cached_transformers.state import State

from .parts.kernels import LinearKernel, fla_scan, takes_fla
from .parts.linearised import LinearisedAttention, elu_features, hidden, quotient, with_ones
from .parts.scan import causal_scan


@ATTENTIONS.register(
    "linear",
    paper="arXiv:2006.16236",
    title="Linear Transformer",
    purpose="a state of fixed size, linear in N",
    equation="phi(q) sum phi(k) v^T / (phi(q) . sum phi(k)),  phi(x) = elu(x) + 1",
    order="N",
    cost="2 N E (E + 1) multiply-adds a head; causal N (C (2 E + 1) + 2 E (E + 1)) for chunks of C tokens",
)
class LinearAttention(LinearisedAttention):
    """Linear attention with the feature map elu(x) + 1.

    Args:
        chunk: C, tokens that the causal form takes at once; changes the cost alone.
        epsilon: added to the normaliser; 1e-6 in the original implementation.
        carry: the state goes on from segment to segment; see `LinearisedAttention`.
        kernel: of the causal form: "plain", "fla" (flash-linear-attention, on a GPU) or "auto".

    Raises:
        ValueError: a chunk below 1, a negative epsilon, or an unknown kernel.
    """

    def __init__(
        self, *, chunk: int = 64, epsilon: float = 0.0, carry: bool = False, kernel: LinearKernel = "plain"
    ) -> None:
        super().__init__(carry=carry)
        self.kernel = kernel
        at_least_one(chunk=chunk)
        if epsilon < 0:
            raise ValueError(f"epsilon={epsilon} must be at least 0: the normaliser is a sum of positive numbers")
        self.chunk, self.epsilon = chunk, epsilon

    def features(self, x_BHNE: Tensor, maps: Tensor | None) -> Tensor:
        return elu_features(x_BHNE)

    def empty(self, rows: int, heads: int, width: int, value_width: int, like: Tensor) -> Tensor:
        return like.new_zeros(rows, heads, width, value_width + 1)

    def write(self, state: State, k_BHMF: Tensor, v_BHMV: Tensor, seen_BM: Tensor | None) -> Tensor:
        sums: Tensor = state + hidden(k_BHMF, seen_BM).mT @ with_ones(v_BHMV)
        return sums

    def read(self, q_BHNF: Tensor, state: State) -> Tensor:
        return quotient(q_BHNF @ state, self.epsilon)

    def run(
        self, q_BHNF: Tensor, k_BHNF: Tensor, v_BHNV: Tensor, state: State, seen_BN: Tensor | None, x_BND: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        k_BHNF, v_BHNV = hidden(k_BHNF, seen_BN), with_ones(v_BHNV)
        if takes_fla(self.kernel, q_BHNF):
            sums, state = fla_scan(q_BHNF, k_BHNF, v_BHNV, state)
        else:
            sums, state = causal_scan(q_BHNF, k_BHNF, v_BHNV, state, chunk=self.chunk)
        return quotient(sums, self.epsilon), state
