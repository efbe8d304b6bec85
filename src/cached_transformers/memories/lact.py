"""LaCT, large-chunk test-time training (Zhang et al. 2025, arXiv:2505.23884; github.com/a1600012888/LaCT).

A few wide nets hold the past in their weights. A segment is a chunk: all its tokens read the weights as the segments
before have left them ("apply"), and take one step of gradient descent together when it ends ("then update"); among
themselves they have the layer's attention; the read is added to its result.

    f(x) = W_1 (silu(W_0 x) * W_2 x),              loss = -sum_j <v_j, f(k_j)>, each matrix with rates lr_j of its own
    P <- G + m P                                   G = -gradients, by rates; m the mean of sigmoid(w . x_j) over a chunk
    W <- rows(W + NS(P))                           NS(P) Newton-Schulz of P ("Muon"); or P itself
    o = y + silu(u . x) RMSNorm(f(q))

    lr_j = softplus(w . x_j + c),   q = norm(silu(a q + b)),  k likewise,  v = silu(v)     of the layer's q, k and v

Without momentum and Muon P = G, and W <- rows(W + P). `rows` gives every row the length that it has in the initial
weights; with `keep="sum"`, only where W is read. NS makes all singular values of P about 1, so that a chunk's step is
as large whatever the rates are, which then weigh its tokens alone.

Legend: B rows, G nets, N tokens, H heads, E head width, D model width, K = V = D / G, F width between the matrices of a
net; `...` any leading dimensions.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.attentions.parts.building_blocks import wide
from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.memory import LayerMemory, ProjectKV, Query, Reading, Trace
from cached_transformers.interfaces.probing import Probing
from cached_transformers.registry import MEMORIES
from cached_transformers.state import map_state, refuse_narrow

from .parts.fast_weights import newton_schulz, written
from .parts.options import NO_MEMORY, check_positive
from .parts.recurrent import full_precision, shown

EPSILON = 1e-5
"""Added to lengths that are divided by."""
NEWTON_SCHULZ = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""Coefficients of its steps, as released."""


class Nets(NamedTuple):
    """Matrices (..., F, K), (..., V, F) and (..., F, K) of nets, or updates of them."""

    W_0: Tensor
    W_1: Tensor
    W_2: Tensor


class LaCTState(NamedTuple):
    """Weights of the nets, their momentum (`()` without), and how many tokens a row has written."""

    weights: Nets
    momentum: Nets | tuple[()]
    tokens_B: Tensor


class OpenedNets(NamedTuple):
    """Weights that are read, the initial ones where nothing was written, and the rows in which something was."""

    weights: Nets
    any_B: Tensor


def apply(nets: Nets, x: Tensor) -> Tensor:
    """f(x), (..., N, V), of (..., N, K)."""
    return (F.silu(x @ nets.W_0.mT) * (x @ nets.W_2.mT)) @ nets.W_1.mT


class _Outer(torch.autograd.Function):
    """x^T e, whose gradients are in order in memory, as elementwise operations want them; autograd's are not."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, e: Tensor) -> Tensor:
        return x.mT @ e

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, e = ctx.saved_tensors
        return e @ grad.mT, x @ grad


def descent(nets: Nets, k: Tensor, v: Tensor, rates: tuple[Tensor, ...]) -> Nets:
    """G: sums over tokens (..., N, K or V) of minus their gradients, by rates (..., N, 1) of each matrix."""
    gate, up, back = k @ nets.W_0.mT, k @ nets.W_2.mT, v @ nets.W_1
    share = gate.sigmoid()
    open_ = gate * share
    errors = Nets(back * up * torch.addcmul(share, open_, 1 - share), v, back * open_)
    inputs = Nets(k, open_ * up, k)
    # a compiler and a pass without gradients take the product itself
    plain = torch.compiler.is_compiling() or not torch.is_grad_enabled()
    outer: Any = _Outer.forward if plain else _Outer.apply
    return Nets(*(outer(error, rate * x) for error, rate, x in zip(errors, rates, inputs, strict=True)))


def _length(t: Tensor) -> Tensor:
    """(..., 1): of each row, and a little above 0."""
    return t.norm(dim=-1, keepdim=True) + EPSILON


def rows_like(t: Tensor, like: Tensor) -> Tensor:
    """`t` with rows as long as those of `like`."""
    return t * (like.norm(dim=-1, keepdim=True) / _length(t))


@MEMORIES.register(
    "lact",
    paper="arXiv:2505.23884",
    title="Large-Chunk Test-Time Training",
    carries="weights of a few wide gated nets, which take one step of gradient descent a segment",
    purpose="associations, as many as keys are wide",
    equations="o = y + silu(u x) RMSNorm(f(q)), f(x) = W_1 (silu(W_0 x) * W_2 x);  W' = rows(W + G), "
    "G = sum lr_j grad <v_j, f(k_j)>; momentum: P' = G + m P for G, Muon: NS(.) of it",
    state="per row and layer, K = D / G, F = expansion K: 12 D F + 8 bytes, and 12 D F with momentum",
    cost="per token and layer: 3 D F + D G (read) and 6 D F + 3 D G (write), momentum D G; and for each segment, with "
    "Muon 15 G (2 K^2 F + K^3) multiply-adds",
    reach="unbounded; rows of fixed length, so that every step overwrites a share of the content",
    gradient="through the weights and every step of their learning, over `bptt` segments",
    probe=Probing(why="every step overwrites a share of the content, at no length that is known"),
)
class LaCT(LayerMemory):
    """Wide gated nets per row that learn values by key, in one step for all tokens of a segment.

    It uses the layer's own queries, keys and values, before positions; writes are read from the next segment on. The
    state is float32 at least.

    Args:
        width: D. heads: H.
        nets: G; of 4, 2 and 1 the most that divides the width when None. expansion: F over K.
        muon: Newton-Schulz of every step, which makes some 500 times of a rounding error.
        momentum: carry P from segment to segment.
        keep: "rows", weights with rows of their initial length, or "sum", the weights without, which get it when read.
        rate: lr at first; without `muon`, the size of the steps.
        first: read of a row without a past: nothing ("bypass"), or the initial weights ("apply"), as in the paper.
        initial_scale: bias of u . x at first.
        channels: of the layer's input, where they are not D. The model gives them.
    """

    needs = frozenset({"state", "head"})

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        nets: int | None = None,
        expansion: int = 1,
        muon: bool = False,
        momentum: bool = False,
        keep: Literal["rows", "sum"] = "rows",
        rate: float = 0.001,
        first: Literal["bypass", "apply"] = "bypass",
        initial_scale: float = 1.0,
        channels: int | None = None,
    ) -> None:
        super().__init__()
        nets = next(n for n in (4, 2, 1) if width % n == 0) if nets is None else nets
        at_least_one(NO_MEMORY, heads=heads, nets=nets, expansion=expansion)
        for name, parts in (("heads", heads), ("nets", nets)):
            if width % parts:
                raise ValueError(f"{name}={parts} must divide width={width}: each has an equal part of the channels")
        check_positive(rate=rate)
        self.heads, self.nets, self.muon = heads, nets, muon
        self.normed_when_read = keep == "sum"
        self.bypass = first == "bypass"
        k, f = width // nets, expansion * width // nets
        shapes = Nets((f, k), (k, f), (f, k))  # type: ignore[arg-type]
        self.initial = nn.ParameterList(torch.randn(nets, o, i) / i**0.5 for o, i in shapes)
        self.scale_2D, self.offset_2D = nn.Parameter(torch.ones(2, width)), nn.Parameter(torch.zeros(2, width))
        channels = channels or width
        self.rates = nn.Linear(channels, 3 * nets)
        self.keeping = nn.Linear(channels, nets) if momentum else None
        self.norm = nn.RMSNorm(k, eps=EPSILON)
        self.scale = nn.Linear(channels, nets)
        with torch.no_grad():
            self.rates.bias.fill_(rate + math.log(-math.expm1(-rate)))  # the inverse of softplus
            self.scale.bias.fill_(initial_scale)

    def init_state(self, batch_size: int, like: Tensor) -> LaCTState:
        dtype = torch.promote_types(like.dtype, torch.float32)
        zeros = Nets(*(like.new_zeros(batch_size, *t.shape, dtype=dtype) for t in self.initial))
        momentum = () if self.keeping is None else map_state(torch.clone, zeros)
        return LaCTState(zeros, momentum, torch.zeros(batch_size, dtype=torch.long, device=like.device))

    def open(self, state: LaCTState, first_B1P: Tensor | None, project_kv: ProjectKV | None) -> OpenedNets:
        refuse_narrow(state, "the small steps by which the nets of LaCT learn")
        any_B = state.tokens_B > 0
        initial = self._initial(state)
        weights = _where(any_B, state.weights, initial)
        if self.normed_when_read:
            weights = _where(any_B, Nets(*map(rows_like, weights, initial)), initial)
        return OpenedNets(weights, any_B)

    def read(self, opened: OpenedNets, query: Query, project_kv: ProjectKV | None) -> Reading:
        assert query.q_BHNE is not None
        x_BND = shown(query.x_BND, query.padding_BN)
        scale_BNG1 = F.silu(self.scale(x_BND))[..., None]
        if self.bypass:
            scale_BNG1 = scale_BNG1 * opened.any_B.view(-1, 1, 1, 1)
        with full_precision(x_BND):
            f_BGNV = apply(opened.weights, self._asking(query.q_BHNE, 0, query.padding_BN))
            # RMSNorm whose factor takes the scale: one product of all channels less
            f_BNGV = f_BGNV.transpose(1, 2).contiguous()
            factor_BNG1 = (f_BNGV.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * scale_BNG1
            out_BNGV = factor_BNG1 * f_BNGV * self.norm.weight
        out_BHNE = out_BNGV.flatten(2).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return Reading(None, out_BHNE, opened.weights, any_B=opened.any_B if self.bypass else None)

    def combine(self, y_BHNE: Tensor, query: Query, reading: Reading) -> Tensor:
        assert reading.output_BHNE is not None
        return y_BHNE + reading.output_BHNE.to(y_BHNE.dtype)

    def write(self, state: LaCTState, trace: Trace) -> tuple[LaCTState, None]:
        (x_BND, padding_BN), (k_BHNE, v_BHNE) = trace.query[0:4:3], trace.query[5:7]
        assert k_BHNE is not None and v_BHNE is not None
        written_B = written(padding_BN, x_BND)
        x_BND = shown(x_BND, padding_BN)
        logits = wide(self.rates(x_BND))
        # softplus: that of torch has a gradient of other strides than its compiled trace takes it to have
        rates_BNG = torch.logaddexp(logits, torch.zeros_like(logits))
        keeping_BNG = None if self.keeping is None else wide(self.keeping(x_BND)).sigmoid()
        with torch.autocast(x_BND.device.type, enabled=False):
            nets, initial = trace.reading.carry or self.open(state, None, None).weights, self._initial(state)
            k_BGNK = self._asking(k_BHNE, 1, padding_BN)
            v_BGNV = self._nets(F.silu(shown(v_BHNE, padding_BN).transpose(1, 2).flatten(2))).contiguous()
            rates = shown(rates_BNG, padding_BN).mT.unflatten(1, (3, self.nets))[..., None].unbind(1)
            steps, momentum = descent(nets, k_BGNK, v_BGNV, rates), state.momentum
            if keeping_BNG is not None:
                m_BG = shown(keeping_BNG, padding_BN).sum(1) / written_B.clamp(min=1)[:, None]
                before = _where(state.tokens_B > 0, momentum, map_state(torch.zeros_like, momentum))
                steps = Nets(*(g + m_BG[..., None, None] * p for g, p in zip(steps, before, strict=True)))
                momentum = _where(written_B > 0, steps, state.momentum)
            if self.muon:
                steps = Nets(*(newton_schulz(t, NEWTON_SCHULZ) for t in steps))
            if self.normed_when_read:
                sums = _where(state.tokens_B > 0, state.weights, initial)
                weights = Nets(*(w + step for w, step in zip(sums, steps, strict=True)))
            else:
                weights = Nets(*(rows_like(w + s, i) for w, s, i in zip(nets, steps, initial, strict=True)))
        if padding_BN is not None or not x_BND.shape[1]:
            weights = _where(written_B > 0, weights, state.weights)
        return LaCTState(weights, momentum, state.tokens_B + written_B), None

    def close_gate(self) -> None:
        with torch.no_grad():
            self.scale.weight.zero_()
            self.scale.bias.zero_()

    def _initial(self, state: LaCTState) -> Nets:
        return Nets(*(t.to(state.weights.W_0.dtype) for t in self.initial))

    def _nets(self, t_BND: Tensor) -> Tensor:
        return wide(t_BND).unflatten(-1, (self.nets, -1)).transpose(1, 2)

    def _asking(self, t_BHNE: Tensor, which: int, padding_BN: Tensor | None) -> Tensor:
        """Queries (0) or keys (1) of the nets, (B, G, N, K), of those of the layer."""
        t_BND = wide(shown(t_BHNE, padding_BN).transpose(1, 2).flatten(2))
        scale_D, offset_D = (t[which].to(t_BND.dtype) for t in (self.scale_2D, self.offset_2D))
        # contiguous, as three products and their gradients want it
        t_BGNK = self._nets(F.silu(torch.addcmul(offset_D, t_BND, scale_D))).contiguous()
        return t_BGNK * _length(t_BGNK).reciprocal()


def _where(choose_B: Tensor, first: Any, second: Any) -> Any:
    """Select per row the first or the second; no value of the other reaches a result, not even NaN."""
    return map_state(lambda a, b: torch.where(choose_B[:, None, None, None], a, b.to(a.dtype)), first, second)
