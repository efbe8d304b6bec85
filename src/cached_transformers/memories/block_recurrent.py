"""Block-Recurrent Transformer (Hutchins, Schlag, Wu, Dyer, Neyshabur 2022, arXiv:2203.07852;
github.com/google-research/meliad).

S state vectors of one upper layer and the tokens of each segment attend each other, and gates renew the vectors: a
recurrence over segments instead of one over tokens. All attentions have H heads, and none has positions.

    s = rms_norm(C) + ids,    k_s, v_s, q_s, q_s' = maps of s of their own
    tokens    y = W_o attn(q, K, V) + W_s attn(x W_q', k_s, v_s)
    states    z = [attn(q_s, k_s, v_s), attn(q_s', K, V)]
    skip      C' = gate(C, W_z z; z)
    dual      C1 = gate(C, W_z z; z),  h = relu(W_1 rms_norm(C1)),  C' = gate'(C1, W_2 h; h)
    single    h = relu(W_1 z),         C' = gate(C, tanh(W_2 h); h)
    fixed     gate(C, c; .) = g C + (1 - g) c,    g = sigmoid(b), of each channel
    lstm      gate(C, c; u) = f C + i c,          f = sigmoid(W_f u + b_f + 1),  i = sigmoid(W_i u + b_i - 1)

K and V are the layer's own, of the segment's tokens. W_o and W_s are two halves of the paper's one map of both results.
Tokens read C, never C', which has seen the whole segment. Before its first segment a row has the learned C_0.

Legend: B rows, N tokens, S states, H heads, E head width, D = H E model width, F hidden width, U width of a gate's
input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.memory import LayerMemory, Linear, ProjectKV, Query, Reading, Trace
from cached_transformers.interfaces.probing import Probing, fixed
from cached_transformers.linear_maps import Weights
from cached_transformers.registry import MEMORIES
from cached_transformers.state import State

from .parts.options import NO_MEMORY, Gate, check_heads, chosen_layers, gated
from .parts.recurrent import shown, wrote

EPSILON = 1e-6
"""Epsilon of root mean squares, and the smallest divisor of queries and keys; as in the authors' code."""
SPREAD = 0.1
"""Standard deviation of C_0 and of the biases of fixed gates, and how small maps of gates begin; likewise."""


class States(NamedTuple):
    """C, and how many segments the row has written; before the first one it is C_0, whatever it holds."""

    states_BSD: Tensor
    segments_B: Tensor


class OpenedStates(NamedTuple):
    """C, and the maps of s: keys and values, and the queries with which states ask each other and the tokens."""

    states_BSD: Tensor
    k_BHSE: Tensor
    v_BHSE: Tensor
    own_BHSE: Tensor
    cross_BHSE: Tensor


class StateGate(nn.Module):
    """Gates for the kept part of a state and the added part of a candidate; `looks_at` is U."""

    def __init__(self, kind: str, width: int, looks_at: int, gates: Gate, bias: float) -> None:
        super().__init__()
        self.gates: Gate = gates
        self.linear: nn.Linear | None = None
        if kind == "fixed":
            self.bias_D = nn.Parameter(bias + SPREAD * torch.randn(width))
            return
        self.linear = nn.Linear(looks_at, 2 * width)
        with torch.no_grad():
            self.linear.weight.mul_(SPREAD)
            self.linear.bias.copy_(torch.tensor([1 + bias, -1]).repeat_interleave(width))

    def forward(self, states_BSD: Tensor, candidate_BSD: Tensor, u_BSU: Tensor) -> Tensor:
        # In the dtype of the states: next to 1 a gate has no digits in lower ones.
        candidate_BSD = candidate_BSD.to(states_BSD.dtype)
        if self.linear is None:
            stay_D = gated(self.bias_D.to(states_BSD.dtype), self.gates)
            return stay_D * states_BSD + (1 - stay_D) * candidate_BSD
        stay_BSD, come_BSD = gated(self.linear(u_BSU).to(states_BSD.dtype), self.gates).chunk(2, -1)
        return stay_BSD * states_BSD + come_BSD * candidate_BSD


LONG: dict[str, Any] = {"form": "dual"}
"""Options with which states outlive many segments: a feed-forward corrects a slightly wrong state, where attention
without one passes the error on."""


@MEMORIES.register(
    "block_recurrent",
    paper="arXiv:2203.07852",
    title="Block-Recurrent Transformer",
    carries="state vectors of one layer, which tokens read, and which gates renew after each segment",
    purpose="a state of fixed size, written by what training needs",
    equations="y = W_o attn(q, K, V) + W_s attn(q', C);  C' = g C + (1 - g) W_z [attn(C, C), attn(C, K, V)], "
    "g = sigmoid(b);  lstm: f C + i c, of gates that see the segment",
    state="per row, in one layer: 4 S D + 8 bytes, S = length",
    cost="per token, in one layer: 2 D^2 + 4 S D + S / N (6 D^2 + 2 S D) multiply-adds; an lstm gate 4 D^2 S / N more, "
    "or 2 D F S / N where it looks at a hidden layer of F; form='dual' 2 D F S / N and a second gate more; "
    "form='single' (3 F - 2 D) D S / N more",
    reach="unbounded; what fits into S vectors",
    gradient="through the states, over `bptt` segments",
    probe=Probing(fixed(length=4), farther=fixed(length=4, **LONG)),
    presets={"long": LONG, "trained": {"initial_output": 0.0}},
)
class BlockRecurrent(LayerMemory):
    """State vectors of one upper layer, read by the tokens of a segment and renewed by gates when it ends.

    Queries, keys and values of the segment are the layer's, before positions. C is float32 at least: a slow gate adds
    little each time. Padding is neither read nor written. The paper's window is another memory:
    `memory=["transformer_xl", "block_recurrent"]`.

    Args:
        width: D. heads: H.
        length: S, states.
        layers: the layer that has them, counted from 1, or several, or "all"; five sixths of the depth when None (10
            of 12).
        gate: "fixed", learned, one a channel, which the paper finds best; or "lstm", which sees the segment.
        form: "skip" (no feed-forward), "dual" (with one, and a gate after either) or "single" (with one).
        gates: a "sigmoid", by which something of every segment comes in, or "stretched", which can close.
        gate_bias: how much more of a state stays at first, in logits.
        initial_scale: None for logits over sqrt(E); a number makes queries and keys of unit length, and is where a
            learned factor a head begins, as in the paper, of 1.
        initial_output: factor of W_s at first; 0 for models that were trained without it (`preset="trained"`).
        feed_forward: F, of forms that have one; 4 D when None.
        channels: of the layer's input and output, where they are not D. index, depth: which layer of how many this is,
            counted from 0. The model gives them.
    """

    needs = frozenset({"state", "head"})  # nothing in the layers that have no states

    def __init__(
        self,
        width: int,
        heads: int,
        length: int = 128,
        *,
        layers: int | Sequence[int] | Literal["all"] | None = None,
        gate: Literal["fixed", "lstm"] = "fixed",
        form: Literal["skip", "dual", "single"] = "skip",
        gates: Gate = "sigmoid",
        gate_bias: float = 0.0,
        initial_scale: float | None = None,
        initial_output: float = 1.0,
        feed_forward: int | None = None,
        channels: int | None = None,
        index: int | None = None,
        depth: int | None = None,
    ) -> None:
        super().__init__()
        at_least_one(NO_MEMORY, length=length)
        at_least_one("; None is 4 times the width", feed_forward=feed_forward)
        _check(width, heads, gate_bias, initial_scale, initial_output)
        self.heads, self.form = heads, form
        chosen = chosen_layers("layers", layers, depth, 5 / 6)
        self.here = index is None or chosen is None or index + 1 in chosen
        if not self.here:
            self.needs = frozenset()
            return
        self.initial_SD = nn.Parameter(SPREAD * torch.randn(length, width))
        self.names_SD = nn.Parameter(torch.randn(length, width))
        self.norm = nn.RMSNorm(width, eps=EPSILON)
        channels = channels or width
        self.query, self.output = nn.Linear(channels, width, bias=False), nn.Linear(width, channels, bias=False)
        self.maps = nn.Linear(width, 4 * width, bias=False)
        with torch.no_grad():
            self.output.weight.mul_(initial_output)
        scale_3H11 = None if initial_scale is None else torch.full((3, heads, 1, 1), float(initial_scale))
        self.scale_3H11 = None if scale_3H11 is None else nn.Parameter(scale_3H11)
        hidden, both = feed_forward or 4 * width, 2 * width
        if form != "single":
            self.candidate = nn.Linear(both, width, bias=False)
        if form != "skip":
            self.inner = nn.Linear(both if form == "single" else width, hidden, bias=False)
            self.outer = nn.Linear(hidden, width, bias=False)
        self.gate = StateGate(gate, width, hidden if form == "single" else both, gates, gate_bias)
        if form == "dual":
            self.second_norm = nn.RMSNorm(width, eps=EPSILON)
            self.second_gate = StateGate(gate, width, hidden, gates, gate_bias)

    def init_state(self, batch_size: int, like: Tensor) -> State:
        if not self.here:
            return ()
        states_BSD = like.new_zeros(
            batch_size, *self.initial_SD.shape, dtype=torch.promote_types(like.dtype, torch.float32)
        )
        return States(states_BSD, torch.zeros(batch_size, dtype=torch.long, device=like.device))

    def open(self, state: State, first_B1P: Tensor | None, project_kv: ProjectKV | None) -> OpenedStates | tuple[()]:
        if not self.here:
            return ()
        # Those at the start are recomputed, so that a fresh state is no part of the graph, and never outdated.
        states_BSD = torch.where(
            state.segments_B[:, None, None] > 0, state.states_BSD, self.initial_SD.to(state.states_BSD.dtype)
        )
        named_BSD = self.norm(states_BSD.to(self.norm.weight.dtype)) + self.names_SD
        return OpenedStates(states_BSD, *(self._heads(t_BSD) for t_BSD in self.maps(named_BSD).chunk(4, -1)))

    def read(self, opened: OpenedStates | tuple[()], query: Query, project_kv: ProjectKV | None) -> Reading:
        if not isinstance(opened, OpenedStates):
            return Reading()
        q_BHNE = self._heads(self.query(shown(query.x_BND, query.padding_BN)))
        return Reading(output_BHNE=self._attend(0, q_BHNE, opened.k_BHSE, opened.v_BHSE), carry=opened)

    def project(self, y_BHNE: Tensor, query: Query, reading: Reading, linear: Linear, weights: Weights) -> Tensor:
        y_BND = super().project(y_BHNE, query, reading, linear, weights)
        if reading.output_BHNE is None:
            return y_BND
        return y_BND + self.output(reading.output_BHNE.transpose(1, 2).flatten(2)).to(y_BND.dtype)

    def write(self, state: State, trace: Trace) -> tuple[State, None]:
        if not self.here:
            return state, None
        opened: OpenedStates = trace.reading.carry
        k_BHNE, v_BHNE, padding_BN = trace.query.k_BHNE, trace.query.v_BHNE, trace.query.padding_BN
        assert k_BHNE is not None and v_BHNE is not None
        wrote_B, seen_B11N = wrote(padding_BN, trace.x_BND), None
        if padding_BN is not None:
            seen_B11N = ~(padding_BN & wrote_B[:, None])[:, None, None]  # a softmax needs a key
            k_BHNE, v_BHNE = (shown(t, padding_BN) for t in (k_BHNE, v_BHNE))
        dtype = opened.k_BHSE.dtype
        made = (
            self._attend(1, opened.own_BHSE, opened.k_BHSE, opened.v_BHSE),
            self._attend(2, opened.cross_BHSE, k_BHNE.to(dtype), v_BHNE.to(dtype), seen_B11N),
        )
        z_BSU = torch.cat([t.transpose(1, 2).flatten(2) for t in made], -1)
        after_BSD = self._renewed(opened.states_BSD, z_BSU)
        states_BSD = torch.where(wrote_B[:, None, None], after_BSD, state.states_BSD)
        return States(states_BSD, state.segments_B + wrote_B), None

    def close_gate(self) -> None:
        if self.here:
            with torch.no_grad():
                self.output.weight.zero_()

    def _renewed(self, states_BSD: Tensor, z_BSU: Tensor) -> Tensor:
        """C' from C and the result of the states' attention."""
        if self.form == "single":
            h_BSF = self.inner(z_BSU).relu()
            return self.gate(states_BSD, self.outer(h_BSF).tanh(), h_BSF)  # type: ignore[no-any-return]
        after_BSD: Tensor = self.gate(states_BSD, self.candidate(z_BSU), z_BSU)
        if self.form == "skip":
            return after_BSD
        h_BSF = self.inner(self.second_norm(after_BSD.to(self.norm.weight.dtype))).relu()
        return self.second_gate(after_BSD, self.outer(h_BSF), h_BSF)  # type: ignore[no-any-return]

    def _attend(self, which: int, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
        """Softmax attention, head by head; `which` of the three it is says whose scale it has."""
        if self.scale_3H11 is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        q, k = (F.normalize(t, dim=-1, eps=EPSILON) for t in (q, k))
        return F.scaled_dot_product_attention(q * self.scale_3H11[which].to(q.dtype), k, v, attn_mask=seen, scale=1.0)

    def _heads(self, t_BND: Tensor) -> Tensor:
        return t_BND.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def _check(width: int, heads: int, bias: float, scale: float | None, output: float) -> None:
    """Refuse (ValueError) numbers that do not fit."""
    check_heads(width, heads)
    for name, value in {"gate_bias": bias, "initial_output": output, "initial_scale": scale}.items():
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{name}={value} must be a finite number")
    if scale == 0:
        raise ValueError("initial_scale=0 would attend all alike and never learn; take 1, or None for 1 / sqrt(E)")
