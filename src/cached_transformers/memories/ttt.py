"""Test-time training: TTT-Linear and TTT-MLP (Sun et al. 2024, arXiv:2407.04620;
github.com/test-time-training/ttt-lm-pytorch), beside attention.

Each head carries the weights of a small model f, which learn by a step of gradient descent for each token. Mini-batches
of b tokens share the weights W at which gradients are taken; token i of one, from 0, reads after its own write:

    f(x) = x W_1 + b_1     or     gelu(x W_1 + b_1) W_2 + b_2         gelu by tanh; 4 E channels between
    l_j = |LN(f(k_j)) - (v_j - k_j)|^2 / 2                            LN with weights of its own in each head
    W_i = W - r_i sum_(j <= i) lr_j grad l_j(W)                       r_i = max(0, 1 / (i + 1) + tau_i)
    lr_j = rate sigmoid(theta . x_j + c) / E
    z_i = q_i + LN(f(q_i; W_i)),    after the mini-batch  W <- W_(b - 1)
    o = y + s LayerNorm(z)                                            y the attention's; over all heads; 0 closes it

q and k are turned by their place in the mini-batch. The state has W, S = -sum lr_j grad l_j of the open mini-batch, and
the number of tokens, which says how far that is: wherever a stream is cut, all results are those of the whole.

LN's gradient is divided by the deviation of f(k), so that matrices begin at N(0, 0.02), not at 0. A gradient of a
linear f is orthogonal to its weights, which grow ever more slowly, and learn more slowly with it; `limit` stops both.

Legend: B rows, N tokens, Q mini-batches, C tokens that a call can have in one of them, G = H heads, E = K = V head
width, D = H E model width, P numbers of a head's model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.attentions.parts.building_blocks import wide
from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.memory import Query, Reading, Trace
from cached_transformers.interfaces.probing import Probing
from cached_transformers.linear_maps import side_by_side
from cached_transformers.positions import RotaryPositions, rotated
from cached_transformers.registry import MEMORIES
from cached_transformers.state import map_state

from .parts import fast_weights
from .parts.fast_weights import FastMemory, FastState, FastWeights, Learned, OpenChunk, Soup, Step, TokenMaps
from .parts.options import NO_MEMORY, check_heads, check_positive
from .parts.recurrent import Answer, Asked, shown

RATES = {"linear": 1.0, "mlp": 0.1}
"""Default rate of the inner step."""
EXPANSION = 4
NORM_BACKWARD = torch.ops.aten.native_layer_norm_backward
EPSILON = 1e-6
"""Epsilon of the layer norms."""


def norm_error(f: Tensor, less: Tensor, weight: Tensor) -> Tensor:
    """The gradient of |LN(f) + less|^2 / 2, LN without a bias, of the kernels of its forward and backward."""
    unit, mean, scale = torch.native_layer_norm(f, f.shape[-1:], None, None, EPSILON)
    error = torch.addcmul(less, unit, weight) * weight
    return NORM_BACKWARD(error, f, f.shape[-1:], mean, scale, None, None, (True, False, False))[0]  # type: ignore[no-any-return]


class InnerModel(FastWeights):
    """f of all heads, its norm, and r: how it learns. Everything that it is given is in float32 or wider."""

    def __init__(
        self, heads: int, width: int, *, model: Literal["linear", "mlp"], mini_batch: int, limit: float | None
    ):
        between = [EXPANSION * width] if model == "mlp" else []
        shapes = list(pairwise([width, *between, width]))
        first = [F.pad(0.02 * torch.randn(heads, i, o), (0, 0, 0, 1)).flatten(1) for i, o in shapes]
        initial_GP = torch.cat(first, 1)
        super().__init__(shapes, initial_GP, activation="gelu_tanh", chunk=mini_batch, limit=limit, biased=True)
        self.mini_batch = mini_batch
        self.norm_weight_GV = nn.Parameter(torch.ones(heads, width))
        self.norm_bias_GV = nn.Parameter(torch.zeros(heads, width))
        self.tau_C = nn.Parameter(torch.zeros(mini_batch))

    def normed(self, f: Tensor) -> Tensor:
        """LN(f), (..., G, C, V)."""
        weight, bias = (t[:, None].to(f.dtype) for t in (self.norm_weight_GV, self.norm_bias_GV))
        return F.layer_norm(f, f.shape[-1:], eps=EPSILON) * weight + bias

    def error(self, given: Tensor, wanted: Tensor) -> Tensor:
        f, wanted = (t.reshape(-1, len(self.norm_weight_GV), *t.shape[-2:]) for t in (given, wanted))
        weight, bias = (t[:, None].to(given.dtype) for t in (self.norm_weight_GV, self.norm_bias_GV))
        return norm_error(f, bias - wanted, weight).view_as(given)

    def move(self, end: Sequence[Tensor], step: Step) -> tuple[Tensor, Tensor]:
        """A full mini-batch goes into the weights, an open one stays a sum."""
        (share, unfinished), (W, S, (push,), error) = end, step
        S = torch.baddbmm(S, push.mT, error)
        return torch.addcmul(W, share, S), unfinished * S

    def follow(self, rule: Sequence[Any], begun: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """By r, and lr as a tensor and a number."""
        (share, push, rate), (_, S, x, error) = rule, step
        S = torch.addcmul(S, x.mT, error * push, value=-rate)
        return torch.addcmul(begun, share, S), S

    def turn(self, nets: OpenChunk) -> OpenChunk:
        fresh, begins = tuple(map(self.limited, nets.weights)), nets.here(0)[0]
        new = (fresh, fresh, tuple(map(torch.zeros_like, nets.sums)))
        chosen = map_state(lambda a, b: torch.where(begins, a, b), new, nets[:3])
        return OpenChunk(*chosen, *nets[3:])  # type: ignore[call-arg]

    def shares(self, dtype: torch.dtype) -> Tensor:
        """r (C,) of the places of a mini-batch."""
        places_C = torch.arange(1, self.mini_batch + 1, device=self.tau_C.device)
        return F.relu(places_C.to(dtype).reciprocal() + self.tau_C.to(dtype))

    def places(self, tokens_B: Tensor, there_BN: Tensor) -> Tensor:
        """(B, N): places of the tokens, counted from the start of the unfinished mini-batch."""
        return (tokens_B % self.mini_batch)[:, None] + there_BN.cumsum(1) - 1

    def forward(
        self,
        learned: Learned,
        tokens_B: Tensor,
        q_BGNK: Tensor,
        k_BGNK: Tensor,
        v_BGNV: Tensor,
        rate_BGN: Tensor,
        there_BN: Tensor,
        soup: Soup | None = None,
    ) -> tuple[Tensor, Learned]:
        """f(q_i; W_i) of each token, (B, G, N, V), and the weights after the last one; 0 for padding."""
        tokens, b, width = k_BGNK.shape[2], self.mini_batch, k_BGNK.shape[-1]
        if tokens == 0:
            return v_BGNV, learned
        # The open mini-batch and those after it, as many as N tokens can touch. The first token of a call is the first
        # of its piece of the open one; padding goes after all of them, and is cut off.
        size, pieces = min(b, tokens), (tokens + b - 2) // b + 1
        place_BN = self.places(tokens_B, there_BN)
        within_BN = torch.where(place_BN < b, there_BN.cumsum(1) - 1, place_BN % b)
        slot_BN = torch.where(there_BN, place_BN // b * size + within_BN, pieces * size)
        share_C = self.shares(v_BGNV.dtype)
        share_BGN = share_C[place_BN % b][:, None].expand_as(rate_BGN)
        mixed = [] if soup is None else [soup.weights]
        given = torch.cat([q_BGNK, k_BGNK, v_BGNV, rate_BGN[..., None], share_BGN[..., None], *mixed], -1)
        token_BS = torch.full_like(slot_BN[:, :1], tokens).expand(-1, pieces * size + 1)
        token_BS = token_BS.scatter(1, slot_BN, torch.arange(tokens, device=slot_BN.device).expand_as(slot_BN))
        laid = _tokens_at(given, token_BS[:, :-1]).unflatten(2, (pieces, size))
        q, k, v, rate, share, *mixed = laid.split([width, width, width, 1, 1, *(t.shape[-1] for t in mixed)], -1)
        soup = soup and Soup(soup.matrices, mixed[0])
        reading = fast_weights.FastReading(None, share, (share * rate.mT).tril())
        ends_Q = torch.arange(1, pieces + 1, device=tokens_B.device) * b
        full_BQ = (tokens_B % b + there_BN.sum(1))[:, None] >= ends_Q
        full = full_BQ.to(v.dtype)[:, None, :, None, None]
        out, after = self.through(learned, q, k, v - k, reading, (rate,), (full * share_C[-1], 1 - full), soup)
        assert out is not None
        return _tokens_at(out.flatten(2, 3), slot_BN), after

    def current(self, learned: Learned, tokens_B: Tensor) -> Tensor:
        """Weights (B, G, P) as the last token that was written has left them."""
        last_B = self.shares(learned.weights_BGP.dtype)[(tokens_B - 1) % self.mini_batch]
        return learned.weights_BGP + last_B[:, None, None] * learned.sums_BGP


@MEMORIES.register(
    "ttt",
    paper="arXiv:2407.04620",
    title="Test-Time Training",
    carries="weights of a linear model or an MLP in each head, which are trained while they read",
    purpose="associations, as many as keys are wide",
    equations="W_i = W - r_i sum_{j <= i} lr_j grad |LN(f(k_j)) - (v_j - k_j)|^2 / 2 in mini-batches; "
    "o = y + s LayerNorm(q + LN(f(q; W_i)))",
    state="per row: 8 bytes, and 8 H P, P = E (E + 1), or E (8 E + 5) with model='mlp'",
    cost="per token and layer: 3 D^2 + D H (projections, rates), and for each place in a mini-batch (C Q for N tokens, "
    "C = min(b, N), Q = (N + b - 2) // b + 1) H (4 P + C (2 E + 1)), with model='mlp' "
    "H (4 P + 4 E^2 + C (10 E + 2)) multiply-adds",
    reach="unbounded; a linear model holds as many keys as E are independent",
    gradient="through the weights and every step of their learning, over `bptt` segments",
    probe=Probing(why="what was learned is written over little by little, at no length that is known"),
)
class TTT(FastMemory):
    """A small model in each head is trained on keys and values while it reads, in training and evaluation alike.

    Keys, queries and values are projections of its own. The state is float32 at least: it is the sum of many small
    steps.

    Args:
        width: D. heads: H.
        model: f, "linear" or "mlp".
        mini_batch: b, tokens whose gradients are taken at the same weights; 1 learns strictly online.
        rate: of the inner steps, for sigmoid = 1; 1 for "linear" and 0.1 for "mlp" when None. 0 learns nothing.
        rotary: turn queries and keys by their place in the mini-batch.
        limit: ours: no matrix begins a mini-batch with a root mean square above it, so that long streams do not wear
            out its learning; None for no limit.
        initial_share: s at first.
        channels: of the layer's input, where they are not D. The model gives them.
    """

    needs = frozenset({"state", "head"})

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        model: Literal["linear", "mlp"] = "linear",
        mini_batch: int = 16,
        rate: float | None = None,
        rotary: bool = True,
        limit: float | None = None,
        initial_share: float = 1.0,
        channels: int | None = None,
    ) -> None:
        super().__init__()
        at_least_one(NO_MEMORY, heads=heads, mini_batch=mini_batch)
        check_heads(width, heads)
        size = width // heads
        rate = RATES[model] if rate is None else rate
        if not 0 <= rate < math.inf:
            raise ValueError(f"rate={rate} must be at least 0 and finite; 0 learns nothing")
        check_positive(limit=limit)
        if rotary and size % 2:
            raise ValueError(
                f"rotary=True turns pairs of channels, and heads of {size} have one left; take rotary=False"
            )
        self.heads, self.rate = heads, rate / size
        self.groups, self.key_width, self.linear = heads, size, model == "linear"
        self.inner = InnerModel(heads, size, model=model, mini_batch=mini_batch, limit=limit)
        self.positions = RotaryPositions(size) if rotary else None
        channels = channels or width
        self.query, self.key, self.value = (nn.Linear(channels, width, bias=False) for _ in range(3))
        self.step = nn.Linear(channels, heads)
        nn.init.normal_(self.step.weight, std=0.02)
        nn.init.zeros_(self.step.bias)
        self.norm = nn.LayerNorm(width, eps=EPSILON)
        self.share_H = nn.Parameter(torch.full((heads,), float(initial_share)))

    @property
    def net(self) -> InnerModel:
        return self.inner

    def snapshot(self, state: FastState) -> Tensor:
        """Weights after the last token; an unfinished mini-batch counts as far as it goes."""
        return self.inner.current(Learned(*state[:2]), state.tokens_B)

    def begin(self, state: FastState, learned: Learned, x_BND: Tensor) -> OpenChunk:
        b, tokens_B, dtype = self.inner.mini_batch, state.tokens_B + x_BND.shape[1], learned.weights_BGP.dtype
        place_BC = (tokens_B[:, None] + torch.arange(b, device=tokens_B.device)) % b
        per_net = [t[..., None, None, None] for t in (place_BC == 0, self.inner.shares(dtype)[place_BC])]
        if self.positions is not None:
            turns: Sequence[Tensor] = self.positions.turn(place_BC[..., None], dtype)
            if tokens_B.device.type in ("cpu", "cuda"):  # which have complex numbers
                turns = [torch.complex(*turns)]
            per_net += [t.transpose(1, 2)[:, :, :, None, None] for t in turns]
        weights, sums = (tuple(self.inner.matrices(t)) for t in learned)
        begun, begins = tuple(map(self.inner.limited, weights)), tuple({-p % b for p in place_BC[:, 0].tolist()})
        return OpenChunk(begun, weights, sums, self._maps(dtype), 0, begins, tuple(per_net))

    def _maps(self, dtype: torch.dtype) -> TokenMaps:
        weight_G1V, bias_G1V = (t[:, None].to(dtype) for t in (self.inner.norm_weight_GV, self.inner.norm_bias_GV))
        weight, bias = self.norm.weight, self.norm.bias
        project = side_by_side([self.query, self.key, self.value, self.step])

        def settled(q_BGNK: Tensor, f_BGNV: Tensor) -> Tensor:
            unit = F.layer_norm(f_BGNV, f_BGNV.shape[-1:], eps=EPSILON)
            z_BND = torch.addcmul(q_BGNK + bias_G1V, unit, weight_G1V).view(len(unit), 1, -1).to(weight.dtype)
            return F.layer_norm(z_BND, weight.shape, weight, bias, EPSILON).view_as(unit)

        return TokenMaps(project, lambda f, less: norm_error(f, less + bias_G1V, weight_G1V), settled)

    def ask(self, opened: FastState | OpenChunk, query: Query) -> Asked:
        """Queries, turned by their place in the mini-batch, and keys, not turned."""
        if isinstance(opened, OpenChunk):
            t_B3GNE, step_BNG = self.projected(opened, query.x_BND)
            placed_B2GNE, (share, *turns) = t_B3GNE[:, :2], opened.here(1)
            placed_B2GNE = rotated(placed_B2GNE, *turns) if turns else placed_B2GNE
            (q_BGNK, k_BGNK), given = placed_B2GNE.unbind(1), F.pad(placed_B2GNE, (0, 1), value=1.0).unbind(1)
            rule = share, step_BNG.sigmoid().view(len(query.x_BND), -1, 1, 1), self.rate
            return Asked(q_BGNK, t_B3GNE[:, 1], (*given, k_BGNK - t_B3GNE[:, 2], *rule))
        x_BND = shown(query.x_BND, query.padding_BN)
        q_BGNK, k_BGNK = self.by_net(self.query(x_BND)), self.by_net(self.key(x_BND))
        return Asked(self._turned(q_BGNK, opened.tokens_B[:, None] + _there(query).cumsum(1) - 1), k_BGNK)

    def online(self, opened: FastState | OpenChunk, query: Query, asked: Asked, soup: Soup | None = None) -> Answer:
        """f of all tokens, the weights after the last one, and the queries, to which f is added."""
        if isinstance(opened, OpenChunk):
            now_BGNV, nets = self.net.step(opened, asked, soup)
            return Answer(now_BGNV, carry=(nets, asked.q_BGNK))
        learned = self.learned(opened)
        n, there_BN = query.x_BND.shape[1], _there(query)
        start, length = query.segment or (0, n)
        x_BND, there_BN = query.x_BND.narrow(1, start, length), there_BN.narrow(1, start, length)
        if query.padding_BN is not None:
            x_BND = x_BND.masked_fill(~there_BN[..., None], 0)
        v_BGNV, rate_BGN = self.by_net(self.value(x_BND)), self.rate * wide(self.step(x_BND)).sigmoid().mT

        def cut(first: int, tokens: int) -> tuple[Tensor, Soup | None]:
            return asked.q_BGNK.narrow(2, first, tokens), soup and soup.narrow(first, tokens)

        with torch.autocast(x_BND.device.type, enabled=False):
            (q_BGNK, within), k_BGNK = cut(start, length), asked.k_BGNK.narrow(2, start, length)
            k_BGNK = self._turned(k_BGNK, self.inner.places(opened.tokens_B, there_BN))
            f_BGNV, after = self.inner(learned, opened.tokens_B, q_BGNK, k_BGNK, v_BGNV, rate_BGN, there_BN, within)
            if length < n:  # a model memory's own tokens write nothing
                weights = self.inner.current(learned, opened.tokens_B)
                front = self.inner.read(weights, *cut(0, start))
                weights = self.inner.current(after, opened.tokens_B + there_BN.sum(1))
                back = self.inner.read(weights, *cut(start + length, n - start - length))
                f_BGNV = torch.cat([front, f_BGNV, back], 2)
        return Answer(f_BGNV, carry=(after, asked.q_BGNK))

    def settle(self, found: Answer) -> Reading:
        after, q_BGNK = found.carry
        if isinstance(after, OpenChunk) and after.maps.finish is not None:
            return Reading(output_BHNE=after.maps.finish(q_BGNK, found.answer_BGNF), carry=after)
        with torch.autocast(q_BGNK.device.type, enabled=False):
            z_BGNV = q_BGNK + self.inner.normed(found.answer_BGNF)
        z_BND = self.norm(z_BGNV.transpose(1, 2).flatten(2).to(self.norm.weight.dtype))
        return Reading(output_BHNE=z_BND.unflatten(-1, (self.heads, -1)).transpose(1, 2), carry=after)

    def combine(self, y_BHNE: Tensor, query: Query, reading: Reading) -> Tensor:
        assert reading.output_BHNE is not None
        share_H11 = self.share_H.to(y_BHNE.dtype).view(-1, 1, 1)
        return torch.addcmul(y_BHNE, share_H11, reading.output_BHNE.to(y_BHNE.dtype))

    def write(self, state: FastState, trace: Trace) -> tuple[FastState, None]:
        return self.after(state, trace.reading.carry, trace), None

    def close_gate(self) -> None:
        with torch.no_grad():
            self.share_H.zero_()

    def _turned(self, t_BHNE: Tensor, places_BN: Tensor) -> Tensor:
        if self.positions is None:
            return t_BHNE
        return self.positions.rotate(t_BHNE, (places_BN.clamp(min=0) % self.inner.mini_batch)[..., None])


def _tokens_at(t_BGNW: Tensor, index_BM: Tensor) -> Tensor:
    """(B, G, M, W): tokens of these indices, 0 for the index N. Rows are copied whole, not number by number."""
    *sizes, n, width = t_BGNW.shape
    flat = torch.cat([t_BGNW.reshape(-1, width), t_BGNW.new_zeros(1, width)])
    first_BG1 = torch.arange(0, len(flat) - 1, n, device=index_BM.device).view(*sizes, 1)
    index_BGM = torch.where(index_BM[:, None] < n, index_BM[:, None] + first_BG1, len(flat) - 1)
    return flat.index_select(0, index_BGM.flatten()).view(*sizes, -1, width)


def _there(query: Query) -> Tensor:
    """(B, N): tokens of the segment that are none of padding."""
    there_BN = query.real_BN
    if query.segment is not None:
        start, length = query.segment
        place_N = torch.arange(there_BN.shape[1], device=there_BN.device)
        there_BN = there_BN & (place_N >= start) & (place_N < start + length)
    return there_BN
