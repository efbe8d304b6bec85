"""The Performer's FAVOR+ (Choromanski et al. 2021, arXiv:2009.14794; github.com/google-research/google-research, folder
performer): softmax attention estimated from positive orthogonal random features.

    log phi_r(x) = w_r . x' - |x'|^2 / 2,  x' = x / E^(1/4);   E[phi(q) . phi(k)] / m = exp(q . k / sqrt(E))  (lemma 1)
    out_i = sum_j (phi(q_i) . phi(k_j)) v_j / sum_j (phi(q_i) . phi(k_j))

W has blocks of E orthogonal rows of random direction, each as long as a Gaussian vector. `kernel="relu"` is generalised
attention, phi(x) = relu(W x') + 0.001.

Cost, in multiply-adds a head for m features: 2 N m (E + V + 1); causal, with chunks of C tokens:
2 N m (E + V + 1) + N (C - 1) (m + V + 1) / 2; a context adds M m (E + V + 1). State: m (V + 2) numbers a head.

What differs from the usual implementations, and why:

- A QR decomposition of a Gaussian matrix gives directions that are not uniform (the first entry of the first row is
  always negative), which makes the estimate biased. The signs of R's diagonal, moved into Q, cure it.
- There, features are exponentials that were shifted by the largest w . x before |x|^2 / 2 is taken off, plus 1e-4; for
  inputs of ordinary size that is a plain mean of the values. Here, features stay logarithms until each has been shifted
  by the largest of its own over the keys, which queries take back: nothing overflows, nothing has to be added, the
  quotient is exact, and each normaliser is at least 1.
- The causal form shifts by nothing that lies after the query. Earlier chunks are shifted by the largest over all keys
  so far; within a chunk, the later half of each stretch of 2, 4, 8 ... tokens reads the earlier half, shifted by the
  largest of that half; then the parts are added. With one shift for a chunk, a large key would make those before it
  vanish.

Legend: B rows, H heads, N tokens, M keys of a context, E key width, V value width (with the normaliser: V + 1),
F random features (m above), Q chunks, C tokens of a chunk.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.registry import ATTENTIONS

from .parts.building_blocks import into_blocks, out_of_blocks
from .parts.linearised import LinearisedAttention, hidden, quotient, with_ones
from .parts.sizes import head_width

LOW = -1e30
"""Finite logarithm of 0, so that differences are defined."""


class PerformerState(NamedTuple):
    """Sums over the keys, and the logarithm of what feature r of each was divided by: the largest so far."""

    sums_BHFV: Tensor
    top_BHF: Tensor


@ATTENTIONS.register(
    "performer",
    paper="arXiv:2009.14794",
    title="Performer",
    purpose="a state of fixed size, linear in N",
    equation="phi(q) sum phi(k) v^T / (phi(q) . sum phi(k)),  phi_r(x) = exp(w_r . x' - |x'|^2 / 2),  x' = x / E^(1/4)",
    order="N",
    cost="2 N m (2 E + 1) multiply-adds a head for m features; causal, in chunks of C: + N (C - 1) (m + E + 1) / 2",
)
class PerformerAttention(LinearisedAttention):
    """Softmax attention estimated without bias from positive orthogonal random features (FAVOR+).

    Args:
        width: D. heads: H.
        features: m, random features.
        kernel: "softmax", or "relu" for generalised attention.
        orthogonal: orthogonal blocks of directions, which lower the variance; False draws them independently.
        paired: half of the directions are the negatives of the others, which lowers the variance further.
        redraw: each training call draws features of its own; evaluation and `step` keep those that are saved. New ones
            to keep: `core.directions_FE.copy_(core.draw())`.
        chunk: C, a power of two: tokens that the causal form takes at once; changes the cost alone.
        carry: the state goes on from segment to segment; see `LinearisedAttention`.

    Raises:
        ValueError: width is no multiple of heads, no features, an odd number of paired ones, an unknown kernel, a chunk
            that is no power of two, or `carry` with `redraw`.
    """

    directions_FE: Tensor

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        features: int = 256,
        kernel: Literal["softmax", "relu"] = "softmax",
        orthogonal: bool = True,
        paired: bool = False,
        redraw: bool = False,
        chunk: int = 64,
        carry: bool = False,
    ) -> None:
        super().__init__(carry=carry)
        if features < 1 or (paired and features % 2):
            raise ValueError(f"features={features} must be at least 1, and even with paired=True")
        if chunk < 1 or chunk & (chunk - 1):
            raise ValueError(f"chunk={chunk} must be a power of two: it is halved down to single tokens")
        if carry and redraw:
            raise ValueError(
                "carry=True reads sums of earlier features, which redraw=True would replace; take one of them"
            )
        self.key_width, self.count, self.kernel = head_width(width, heads), features, kernel
        self.orthogonal, self.paired, self.redraw, self.chunk = orthogonal, paired, redraw, chunk
        self.register_buffer("directions_FE", self.draw())

    def draw(self, generator: torch.Generator | None = None, device: torch.device | None = None) -> Tensor:
        """(F, E): new directions, from torch's global generator when none is given."""
        count = self.count // 2 if self.paired else self.count
        w_FE = random_directions(count, self.key_width, self.orthogonal, generator, device)
        return torch.cat([w_FE, -w_FE]) if self.paired else w_FE

    def maps(self, generator: torch.Generator | None = None, *, fixed: bool = True) -> Tensor:
        saved_FE = self.directions_FE
        if fixed or not self.redraw:
            return saved_FE
        return self.draw(generator, generator.device if generator else saved_FE.device).to(saved_FE.device)

    def features(self, x_BHNE: Tensor, maps: Tensor | None) -> Tensor:
        """Logarithms of features, without what all of them share."""
        assert maps is not None
        x_BHNE = x_BHNE / self.key_width**0.25
        projected = x_BHNE @ maps.to(x_BHNE.dtype).mT
        if self.kernel == "relu":
            return (projected.relu() + 1e-3).log()
        return projected - x_BHNE.square().sum(-1, keepdim=True) / 2

    def empty(self, rows: int, heads: int, width: int, value_width: int, like: Tensor) -> PerformerState:
        if width != self.key_width:
            raise ValueError(f"keys of width {width}: the random features were drawn for {self.key_width}")
        sums_BHFV = like.new_zeros(rows, heads, self.count, value_width + 1)
        return PerformerState(sums_BHFV, like.new_full((rows, heads, self.count), LOW))

    def write(self, state: PerformerState, k_BHMF: Tensor, v_BHMV: Tensor, seen_BM: Tensor | None) -> PerformerState:
        k_BHMF = hidden(k_BHMF, seen_BM, -torch.inf)
        # A shift cancels in the quotient, and so does its gradient.
        top_BHF = torch.maximum(state.top_BHF, k_BHMF.detach().amax(2))
        kept_BHFV = state.sums_BHFV * (state.top_BHF - top_BHF).exp()[..., None]
        return PerformerState(kept_BHFV + (k_BHMF - top_BHF[:, :, None]).exp().mT @ with_ones(v_BHMV), top_BHF)

    def read(self, q_BHNF: Tensor, state: PerformerState) -> Tensor:
        weights_BHNF, _ = unshift(q_BHNF, state.top_BHF[:, :, None])
        return quotient(weights_BHNF @ state.sums_BHFV)

    def run(
        self,
        q_BHNF: Tensor,
        k_BHNF: Tensor,
        v_BHNV: Tensor,
        state: PerformerState,
        seen_BN: Tensor | None,
        x_BND: Tensor | None,
    ) -> tuple[Tensor, PerformerState]:
        k_BHNF = hidden(k_BHNF, seen_BN, -torch.inf)
        sums_BHNV, state = scan_of_logarithms(q_BHNF, k_BHNF, with_ones(v_BHNV), state, self.chunk)
        return quotient(sums_BHNV), state


def random_directions(
    count: int, width: int, orthogonal: bool, generator: torch.Generator | None, device: torch.device | None
) -> Tensor:
    """(count, width): each row is a standard normal vector; with `orthogonal`, rows of a block of `width` are so."""
    rows = torch.randn(count, width, generator=generator, device=device)
    if not orthogonal:
        return rows
    blocks = torch.randn(-(-count // width), width, width, generator=generator, device=device)
    q, r = torch.linalg.qr(blocks)
    # QR fixes the signs by a rule of its own; only with a positive diagonal of R is Q uniform over the rotations.
    signs = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
    directions = (q * signs[:, None]).flatten(0, 1)[:count]
    return directions * rows.norm(dim=-1, keepdim=True)


def unshift(q: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """Features of queries times the keys' divisor, and the logarithm of the remaining divisor."""
    q = q + top
    peak = q.detach().amax(-1, keepdim=True)
    return (q - peak).exp(), peak


def scan_of_logarithms(
    q_BHNF: Tensor, k_BHNF: Tensor, v_BHNV: Tensor, state: PerformerState, chunk: int
) -> tuple[Tensor, PerformerState]:
    """Sums over the keys so far, each row over a positive number of its own, and the state after the last token."""
    tokens = q_BHNF.shape[2]
    if tokens == 0:
        return v_BHNV, state
    size = min(chunk, 1 << (tokens - 1).bit_length())
    q, v = (into_blocks(t, size) for t in (q_BHNF, v_BHNV))
    k = into_blocks(F.pad(k_BHNF, (0, 0, 0, -tokens % size), value=-torch.inf), size)

    largest = k.detach().amax(3)
    tops = torch.cat([state.top_BHF[:, :, None], largest], 2).cummax(2).values
    before, behind = tops[:, :, :-1], tops[:, :, 1:]
    kept = (before - behind).exp()[..., None]
    written = (k - behind[:, :, :, None]).exp().mT @ v
    sums_BHFV, earlier = state.sums_BHFV, []
    for index in range(written.shape[2]):
        earlier.append(sums_BHFV)
        sums_BHFV = sums_BHFV * kept[:, :, index] + written[:, :, index]
    weights, peak = unshift(q, before[:, :, :, None])
    sums = weights @ torch.stack(earlier, 2)

    itself = q + k
    itself_peak = itself.detach().amax(-1, keepdim=True).clamp(min=LOW)
    sums, peak = _add(sums, peak, (itself - itself_peak).exp().sum(-1, keepdim=True) * v, itself_peak)

    half = 1
    while half < size:
        first_k, first_v = (t.unflatten(3, (-1, 2, half))[:, :, :, :, 0] for t in (k, v))
        top = first_k.detach().amax(-2, keepdim=True).clamp(min=LOW)
        weights, part_peak = unshift(q.unflatten(3, (-1, 2, half))[:, :, :, :, 1], top)
        part = weights @ (first_k - top).exp().mT @ first_v
        (first, second), (first_peak, second_peak) = (t.unflatten(3, (-1, 2, half)).unbind(4) for t in (sums, peak))
        second, second_peak = _add(second, second_peak, part, part_peak)
        sums, peak = (torch.stack(pair, 4).flatten(3, 5) for pair in ((first, second), (first_peak, second_peak)))
        half *= 2
    return out_of_blocks(sums, tokens), PerformerState(sums_BHFV, tops[:, :, -1])


def _add(a: Tensor, a_peak: Tensor, b: Tensor, b_peak: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of two parts, each over the exponential of its peak."""
    peak = torch.maximum(a_peak, b_peak)
    return a * (a_peak - peak).exp() + b * (b_peak - peak).exp(), peak
