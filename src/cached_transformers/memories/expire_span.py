"""Expire-Span (Sukhbaatar et al. 2021, arXiv:2105.06548; github.com/facebookresearch/transformer-sequential).

Every stored hidden state says how many steps it deserves to be remembered. Its weight fades out at the end of its span,
and its slot is then free for another one.

    e_j   = L sigmoid(w . norm(h_j) / c + b)                        span of the stored state, by the current w and b
    m_ij  = clamp(1 + (e_j - (i - j)) / R, 0, 1)                    1, then a ramp of R steps, then 0
    A'_ij = m_ij A_ij / sum_j m_ij A_ij = softmax_j(S_ij + log m_ij)
    kept  = of those with e_j + R - age > 0 at the next segment's first token, the M with the most of it left
    loss  = price sum_{0 < m_ij < 1} (e_j - (i - j)) / (R N)        spans on the ramp are pushed down

S are the layer's logits over slots and segment. A state is stored without a gradient; w and b learn through m, and only
where a token is on the ramp of a slot.

Legend: B rows, N tokens, M slots, K = M + N, D model width, P position channels.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.interfaces.memory import Context, ProjectKV, Query, Reading, Trace
from cached_transformers.interfaces.probing import Probing, one_segment
from cached_transformers.registry import MEMORIES

from .parts.fifo_store import Rows, best, kept
from .parts.options import check_positive, one_of
from .transformer_xl import TransformerXL

LOSSES = ("ramp", "mean")


class OpenedSpans(NamedTuple):
    """The context, spans of the slots, and the spans that tokens see, which noise may have shortened."""

    context: Context
    span_BM: Tensor
    seen_BM: Tensor


class Noted(NamedTuple):
    """Record for `write`: spans of the slots, and the loss of the ramp (0 in evaluation)."""

    span_BM: Tensor
    loss: Tensor


@MEMORIES.register(
    "expire_span",
    paper="arXiv:2105.06548",
    title="Expire-Span",
    carries="inputs of every layer, each for as long as it says of itself",
    purpose="a choice out of a long past",
    equations="softmax(S + log m), m = clamp(1 + (e - age) / R, 0, 1), e = L sigmoid(w norm(h) / c + b) of stored h",
    state="per row and layer: M (4 D + 8) + 8 bytes",
    cost="per token and layer: 2 D^2 M / N (keys and values of the slots) + D (M + N) / N (spans) + 2 M D "
    "multiply-adds with the model's positions; relative ones cost more, since slots are no neighbours",
    reach="layers x (longest + ramp) tokens; M are kept",
    gradient="none into the memory; spans learn from tokens on their ramp, projections from keys and values",
    exact_when="length and every span >= tokens seen",
    without={"own_loss": "price=0"},
    # Room for spans of two episodes, which begin at one: all of it is seen at first, and may be forgotten.
    probe=Probing(lambda segment, distance, depth: {"length": 2 * (distance + 1) * segment}, one_segment),
)
class ExpireSpan(TransformerXL):
    """Keys and values of the layer's inputs; each fades out at the end of a span that it predicts itself.

    Args:
        width: D. heads: H.
        length: M, slots.
        longest: L, bound of all spans, in tokens; None for as long as `length` slots hold all that is alive, which is
            length + 1 - ramp.
        ramp: R, tokens over which a weight falls from 1 to 0; an eighth of `length`, at least 1, when None.
        initial: of `longest`, the span that all have at the start, b = logit(initial).
        divisor: c, by which changes of w count less.
        evict: let `longest` and `ramp` promise more than there are slots. Where more are alive, those with the most
            left stay, and what leaves is lost.
        price: alpha, weight of the loss in training; 0 for none. It grows with `longest`: the paper takes 1e-6 to 2e-6
            with spans up to 16384.
        loss: the priced quantity: "ramp", (e - age) / R of slots on a ramp, summed over slots (the released code;
            below 0), or "mean", the mean span of the segment's tokens (the paper), which pushes all of them.
        noisy: in training, cut spans at a random share of `longest`, drawn for a whole batch, in each segment and layer
            (there, one draw for all layers). Noise does not decide which slots are dropped.
        relative, clamp: see `TransformerXL`.
    """

    needs = frozenset({"state", "context", "bias", "own_loss"})

    def __init__(
        self,
        width: int,
        heads: int,
        length: int = 128,
        *,
        longest: float | None = None,
        ramp: float | None = None,
        initial: float = 0.5,
        divisor: float = 1.0,
        evict: bool = False,
        price: float = 1e-6,
        loss: Literal["ramp", "mean"] = "ramp",
        noisy: bool = False,
        relative: bool = True,
        clamp: int | None = None,
    ) -> None:
        super().__init__(width, heads, length, relative=relative, clamp=clamp)
        self.ramp = max(1, length // 8) if ramp is None else ramp
        self.longest = length + 1 - self.ramp if longest is None else longest
        self.initial, self.divisor, self.evict = initial, divisor, evict
        self.price, self.loss, self.noisy = price, one_of("loss", loss, LOSSES), noisy
        self._check(longest is None)
        if not price:
            self.needs = self.needs - {"own_loss"}
        self.weight_D = nn.Parameter(torch.zeros(width))
        self.bias = nn.Parameter(torch.full((1,), math.log(initial / (1 - initial))))

    def _check(self, by_length: bool) -> None:
        check_positive(ramp=self.ramp, divisor=self.divisor)
        if by_length and self.longest <= 0:
            raise ValueError(
                f"ramp={self.ramp} alone is longer than the store of length={self.length}; take a ramp of at most "
                f"{self.length}, or more slots"
            )
        if not 0 < self.longest < math.inf:
            raise ValueError(f"longest={self.longest} must be a number of tokens above 0; None takes what length holds")
        alive = math.ceil(self.longest + self.ramp) - 1
        if alive > self.length and not self.evict:
            raise ValueError(
                f"longest={self.longest} and ramp={self.ramp} keep up to {alive} tokens alive, more than the "
                f"length={self.length} slots hold; take length={alive}, longest={self.length + 1 - self.ramp}, or "
                "evict=True, with which those with the most left stay"
            )
        if not 0 < self.initial < 1:
            raise ValueError(
                f"initial={self.initial} must lie between 0 and 1, both excluded: a share of longest, and spans of "
                "none or all of it would not learn; take 0.01 or 0.99"
            )
        if not 0 <= self.price < math.inf:
            raise ValueError(f"price={self.price} must be at least 0 and finite; 0 leaves spans to the model's loss")

    def spans(self, hidden_BMD: Tensor) -> Tensor:
        """(B, M): e of each hidden state, in tokens; float32 or wider, since a ramp is short beside a span."""
        wide = torch.promote_types(hidden_BMD.dtype, torch.float32)
        with torch.autocast(hidden_BMD.device.type, enabled=False):
            normed_BMD = F.layer_norm(hidden_BMD.to(wide), (self.width,))
            logits_BM = F.linear(normed_BMD, self.weight_D.to(wide)[None])[..., 0] / self.divisor + self.bias.to(wide)
        return self.longest * logits_BM.sigmoid()

    def open(self, state: Rows, first_B1P: Tensor | None, project_kv: ProjectKV | None) -> OpenedSpans:
        assert project_kv is not None
        hidden_BMD = state.clean_BMD
        context = Context(*project_kv(hidden_BMD), state.positions_BMP, state.valid_BM, clean=True)
        span_BM = seen_BM = self.spans(hidden_BMD)
        if self.noisy and self.training:
            seen_BM = torch.minimum(span_BM, self.longest * torch.rand((), dtype=span_BM.dtype, device=span_BM.device))
        return OpenedSpans(context, span_BM, seen_BM)

    def read(self, opened: OpenedSpans, query: Query, project_kv: ProjectKV | None) -> Reading:
        context, span_BM, seen_BM = opened
        assert query.positions_BNP is not None
        age_BNM = query.positions_BNP[:, :, None, 0] - context.positions_BMP[:, None, :, 0]
        left_BNM = seen_BM[:, None] - age_BNM
        share_BNM = (1 + left_BNM / self.ramp).clamp(0, 1)
        loss = share_BNM.new_zeros(())
        if self.training and self.price and self.loss == "ramp":
            on_BNM = (share_BNM > 0) & (share_BNM < 1) & context.valid_BM[:, None]
            asked_BN = torch.ones_like(on_BNM[..., 0])
            if query.padding_BN is not None:
                asked_BN = ~query.padding_BN
            each_BN = torch.where(on_BNM & asked_BN[..., None], left_BNM, 0).sum(2) / self.ramp
            loss = (each_BN.sum(1) / asked_BN.sum(1).clamp(min=1)).mean()
        return Reading(context._replace(visible_BHNM=share_BNM[:, None]), carry=Noted(span_BM.detach(), loss))

    def write(self, state: Rows, trace: Trace) -> tuple[Rows, Tensor | None]:
        assert trace.query.positions_BNP is not None
        noted: Noted = trace.reading.carry
        rows, tokens = trace.x_BND.shape[:2]
        positions_BNP = trace.query.positions_BNP.expand(rows, -1, -1)
        real_BN = torch.ones(rows, tokens, dtype=torch.bool, device=trace.x_BND.device)
        if trace.query.padding_BN is not None:
            real_BN = ~trace.query.padding_BN
        hidden_BND = torch.where(real_BN[..., None], trace.x_BND.detach(), 0)
        span_BN = self.spans(hidden_BND)
        next_B1 = (positions_BNP[..., 0] + real_BN).amax(1, keepdim=True)
        place_BK = torch.cat([state.positions_BMP, positions_BNP], 1)[..., 0]
        left_BK = torch.cat([noted.span_BM, span_BN.detach()], 1) + self.ramp - (next_B1 - place_BK)
        # Not a number is no span that anything is left of.
        alive_BK = torch.cat([state.valid_BM, real_BN], 1) & (left_BK > 0)
        index_BM, real_BM = best(left_BK, alive_BK, self.length)
        stored_BMD = kept(state.hidden_BMD, hidden_BND, index_BM, real_BM)
        after = Rows(stored_BMD, kept(state.positions_BMP, positions_BNP, index_BM, real_BM), real_BM.sum(1))
        if not self.training or not self.price:
            return after, None
        if self.loss == "mean":
            each_B = torch.where(real_BN, span_BN, 0).sum(1) / real_BN.sum(1).clamp(min=1)
            return after, self.price * each_B.mean()
        return after, self.price * noted.loss
