"""Random feature attention (Peng et al. 2021, arXiv:2103.02143; github.com/Noahs-ARK/RFA), with its recency gate.

    phi(x) = [sin(W x), cos(W x)] / sqrt(R),   w_r = sigma * w~_r / tau,  w~_r ~ N(0, 1),   x = q / |q| or k / |k|
    E[phi(q) . phi(k)] = exp(-|q - k|^2 / (2 tau^2)) = const exp(q . k / tau^2)     (sigma = 1)
    S_t = S_{t-1} + phi(k_t) v_t^T,  z_t likewise,  out_t = phi(q_t) S_t / phi(q_t) . z_t
    gated: S_t = g_t S_{t-1} + (1 - g_t) phi(k_t) v_t^T,  g_t = sigmoid(w_g . x_t + b_g)

Queries and keys of length 1 make the temperature tau the only thing that says how sharp attention is. The other kernel,
"arccos", has phi(x) = relu(W x) / sqrt(R). A context is the state before the first token, each slot with weight 1.

Cost, in multiply-adds a head for R frequencies, which are F = 2 R features (R with "arccos"): 2 N R E for the features,
and 2 N F (V + 1), or causal, in chunks of C tokens, N (C (F + V + 1) + 2 F (V + 1)); N D for the gate; a context adds
M (R E + F (V + 1)). State: F (V + 1) + 1 numbers a head. Parameters: E a head, and D + 1 for a gate.

What differs from the original implementation, and why: the normaliser of sines and cosines can come near 0, or below.
There, features are scaled by 0.1 and the normaliser is kept above 1, which leaves outputs over few keys unnormalised.
Here, it is seen over the total weight of the keys (which is known: a count, or 1 minus the product of the gates), and
the magnitude of this mean kernel is kept above `floor`. The released causal class has no gate; the paper's is offered.
Directions are of length 1 exactly (there: x / (|x| + 0.001)).

Legend: B rows, H heads, N tokens, M keys of a context, D model width, E key width, V value width (with the normaliser:
V + 1), F features, R frequencies, P draws of the pool.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.checks import at_least_one
from cached_transformers.registry import ATTENTIONS

from .parts.linearised import LinearisedAttention, head_weights, hidden, with_ones
from .parts.scan import causal_scan
from .parts.sizes import head_width


class RFAState(NamedTuple):
    """Sums over the keys, and the total of the weights with which they are in the sums."""

    sums_BHFV: Tensor
    weight_BH: Tensor


@ATTENTIONS.register(
    "rfa",
    paper="arXiv:2103.02143",
    title="RFA",
    purpose="a state of fixed size, linear in N",
    equation="phi(q) S / (phi(q) . z),  S_t = g_t S_(t-1) + (1 - g_t) phi(k_t) v_t^T,  phi(x) = [sin(W x), cos(W x)]",
    order="N",
    cost="2 N R (3 E + 2) multiply-adds a head for R frequencies; causal N (2 R E + C (2 R + E + 1) + 4 R (E + 1)), "
    "in chunks of C tokens; N D for a gate",
)
class RandomFeatureAttention(LinearisedAttention):
    """Softmax attention over unit vectors estimated from random Fourier features, with an optional recency gate.

    Args:
        width: D. heads: H.
        features: R, frequencies; the Gaussian kernel has a sine and a cosine of each.
        temperature: tau; attention is that of logits q . k / tau^2 of unit vectors.
        kernel: "gaussian" or "arccos".
        gate: a gate a head, from the layer's input, lets older tokens fade. The mechanism is then causal alone.
        pool: P, draws to choose from: each training call takes one a head, no two the same; evaluation the first H.
            None for one draw a head.
        floor: the least magnitude of the mean kernel between a query and its keys. Its expectation is at least
            exp(-2 / tau^2).
        chunk: C, tokens that the causal form takes at once; changes the cost alone.
        carry: the state goes on from segment to segment; see `LinearisedAttention`.

    Raises:
        ValueError: width is no multiple of heads, no features, a temperature, floor or chunk that is not positive, an
            unknown kernel, a pool of less than one draw a head, or `carry`
            with a pool.
    """

    frequencies_PRE: Tensor

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        features: int = 64,
        temperature: float = 1.0,
        kernel: Literal["gaussian", "arccos"] = "gaussian",
        gate: bool = False,
        pool: int | None = None,
        floor: float = 0.01,
        chunk: int = 64,
        carry: bool = False,
    ) -> None:
        super().__init__(carry=carry)
        size = head_width(width, heads)
        at_least_one(features=features, chunk=chunk)
        for name, amount in {"temperature": temperature, "floor": floor}.items():
            if amount <= 0:
                raise ValueError(f"{name}={amount} must be positive")
        if pool is not None and pool < heads:
            raise ValueError(f"pool={pool} must hold at least one draw for each of heads={heads}, or be None")
        if carry and pool is not None:
            raise ValueError(
                f"carry=True reads sums of earlier features, which pool={pool} would replace; take one of them"
            )
        self.heads, self.kernel, self.temperature, self.floor, self.chunk = heads, kernel, temperature, floor, chunk
        if gate:
            self.can = self.can - {"bidirectional", "cross"}
        self.register_buffer("frequencies_PRE", torch.randn(pool or heads, features, size))
        self.scale_H1E = nn.Parameter(torch.ones(heads, 1, size))
        self.gate = nn.Linear(width, heads) if gate else None

    def maps(self, generator: torch.Generator | None = None, *, fixed: bool = True) -> Tensor:
        """(H, R, E): frequencies of each head."""
        pool = self.frequencies_PRE
        if fixed or len(pool) == self.heads:
            return pool[: self.heads]
        device = generator.device if generator else pool.device
        chosen = torch.randperm(len(pool), generator=generator, device=device)[: self.heads]
        return pool[chosen.to(pool.device)]

    def features(self, x_BHNE: Tensor, maps: Tensor | None) -> Tensor:
        assert maps is not None
        unit_BHNE = F.normalize(x_BHNE, dim=-1)
        dtype = x_BHNE.dtype
        angles_BHNR = unit_BHNE @ (self.scale_H1E.to(dtype) * maps.to(dtype) / self.temperature).mT
        size = math.sqrt(maps.shape[1])
        if self.kernel == "arccos":
            return angles_BHNR.relu() / size
        return torch.cat([angles_BHNR.sin(), angles_BHNR.cos()], -1) / size

    def empty(self, rows: int, heads: int, width: int, value_width: int, like: Tensor) -> RFAState:
        if (heads, width) != (self.heads, self.frequencies_PRE.shape[2]):
            raise ValueError(
                f"{heads} heads of width {width}: the random features are of {self.heads} heads of width "
                f"{self.frequencies_PRE.shape[2]}"
            )
        count = self.frequencies_PRE.shape[1] * (1 if self.kernel == "arccos" else 2)
        return RFAState(like.new_zeros(rows, heads, count, value_width + 1), like.new_zeros(rows, heads))

    def write(self, state: RFAState, k_BHMF: Tensor, v_BHMV: Tensor, seen_BM: Tensor | None) -> RFAState:
        seen_BM = k_BHMF.new_ones(k_BHMF[:, 0, :, 0].shape, dtype=torch.bool) if seen_BM is None else seen_BM
        sums_BHFV = state.sums_BHFV + hidden(k_BHMF, seen_BM).mT @ with_ones(v_BHMV)
        return RFAState(sums_BHFV, state.weight_BH + seen_BM.sum(-1, dtype=k_BHMF.dtype)[:, None])

    def read(self, q_BHNF: Tensor, state: RFAState) -> Tensor:
        return self._divide(q_BHNF @ state.sums_BHFV, state.weight_BH[..., None])

    def run(
        self,
        q_BHNF: Tensor,
        k_BHNF: Tensor,
        v_BHNV: Tensor,
        state: RFAState,
        seen_BN: Tensor | None,
        x_BND: Tensor | None,
    ) -> tuple[Tensor, RFAState]:
        k_BHNF, v_BHNV = hidden(k_BHNF, seen_BN), with_ones(v_BHNV)
        if seen_BN is None:
            seen_BN = k_BHNF.new_ones(k_BHNF[:, 0, :, 0].shape, dtype=torch.bool)
        fade_BHN = None
        if self.gate is None:
            weight_BHN = state.weight_BH[..., None] + seen_BN[:, None].cumsum(-1).to(k_BHNF.dtype)
        else:
            logit_BHN = head_weights(self.gate, x_BND, "the gate of rfa")
            # Padding keeps the state: g = 1, and nothing is written.
            fade_BHN = F.logsigmoid(logit_BHN).masked_fill(~seen_BN[:, None], 0)
            k_BHNF = k_BHNF * torch.sigmoid(-logit_BHN)[..., None]
            passed_BHN = fade_BHN.cumsum(-1)
            # The weights of the tokens add up to 1 - g_1 g_2 ... g_t.
            weight_BHN = state.weight_BH[..., None] * passed_BHN.exp() - passed_BHN.expm1()
        sums_BHNV, sums_BHFV = causal_scan(
            q_BHNF,
            k_BHNF,
            v_BHNV,
            state.sums_BHFV,
            log_decay_BHNG=None if fade_BHN is None else fade_BHN[..., None],
            chunk=self.chunk,
        )
        weight_BHN = weight_BHN.expand(sums_BHNV.shape[:3])
        last_BH = weight_BHN[..., -1] if weight_BHN.shape[-1] else state.weight_BH
        return self._divide(sums_BHNV, weight_BHN), RFAState(sums_BHFV, last_BH)

    def _divide(self, sums_BHNV: Tensor, weight_BHN: Tensor) -> Tensor:
        """Over the normaliser, whose sign is kept and whose magnitude is at least `floor` times the total weight."""
        total, weight = sums_BHNV[..., -1:], weight_BHN[..., None]
        least = self.floor * weight
        kept = torch.where(total.abs() >= least, total, torch.where(total < 0, -least, least))
        return sums_BHNV[..., :-1] / torch.where(weight > 0, kept, 1)
