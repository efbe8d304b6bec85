"""Delta-mem (Lei et al. 2026, arXiv:2605.12357; github.com/declare-lab/delta-Mem): a small matrix that each token reads
and writes, and that corrects the layer's queries and outputs.

    q_t, k_t = u(W_q x_t), u(W_k x_t),  v_t = W_v x_t            u(z) = tanh(z) / |tanh(z)|, of each matrix
    b_t = sigmoid(W_b x_t + c),         l_t = 1 - b_t            one a row of S, or one in all; l of its own weights
    r_t = S_(t-1) q_t                                            before the token's own write
    S_t = l S_(t-1) - b (S_(t-1) k) k^T + b v k^T                "outside": erases l b (S k) k^T;  "plain": l = 1
    queries + (scale P_q r_t) before their norm and positions;   the layer's output + scale P_o r_t

A row i of S is a gated delta rule with values of width 1: decay l_i, rate b_i / l_i, value l_i v_i ("outside": rate
b_i, value v_i), in chunks by `causal_scan`, with writes one place later than reads. S shrinks along k by |1 - 2 b|, and
across it by 1 - b.

With write="segment" a segment writes once, the mean of its inputs, and all its tokens read the matrix before it. As
released, c is -1.5, a half-life of 3.4 tokens; `half_life` is 512 tokens for token writes, and the released bias for
segments. P begins with columns of the host's matrices of queries and output, of length 0.05 (as released, 8 of them);
in models of this package with random ones. P = 0 would stop the gradient to W in the first step.

Legend: B rows, N tokens, L places (N + 1), D width, S matrices, V their rows, K their columns (V = K = r), C = S r, G
gates (C, or S), O outputs of the maps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.attentions.parts.building_blocks import wide
from cached_transformers.attentions.parts.scan import causal_scan
from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.capabilities import own_word
from cached_transformers.interfaces.memory import LayerMemory, Linear, ProjectKV, Query, Reading, Trace, Weights
from cached_transformers.interfaces.probing import Probing, fixed
from cached_transformers.registry import MEMORIES
from cached_transformers.state import refuse_narrow

from .parts.recurrent import shown

own_word("queries", "a term added to the queries before their norm and positions")

GAIN = 0.05
"""Length of a column of P at first."""
BIAS = -1.5
"""Released c."""
LEAST = -30.0
"""Least logarithm of l, so that b / l stays finite."""


class DeltaState(NamedTuple):
    """S, values by keys, and how many tokens the row has written."""

    matrix_BSVK: Tensor
    tokens_B: Tensor


class DeltaRead(NamedTuple):
    """scale r of the tokens, and the state after them; of segment writes the state before them."""

    read_BNC: Tensor
    after: DeltaState


@MEMORIES.register(
    "delta_mem",
    paper="arXiv:2605.12357",
    title="delta-mem",
    carries="a matrix of r x r numbers, which corrects queries and outputs",
    purpose="a steer of a pretrained decoder by its past, in a few hundred bytes",
    equations="r_t = S_(t-1) q_t; S_t = l S_(t-1) - b (S_(t-1) k) k^T + b v k^T, l = 1 - b; queries + s P_q r_t, "
    "outputs + s P_o r_t",
    state="per row and layer, in float32: 4 states r^2 + 8 bytes",
    cost="per token and layer, C = states r: D (5 C + G) (maps, G = C gates, or states) + "
    "(1 + 1 / N) G (L (2 r + C / G) + 3 C r / G), L = min(32, N + 1), multiply-adds; write='segment': 3 C D + C r, and "
    "(2 C D + G D + 3 C r) / N",
    reach="as far as decay lets it; at most r keys",
    gradient="through the matrix, over `bptt` segments",
    without={"queries": "correct=('output',)"},
    probe=Probing(fixed(half_life=64.0)),
)
class DeltaMem(LayerMemory):
    """A small matrix that follows a delta rule token by token; reads of it correct the layer's queries and outputs.

    It suits a frozen decoder. S is float32 at least.

    Args:
        width: D. heads: H.
        rank: r. states: S, matrices, each with maps of its own.
        write: after each "token", or the mean of a "segment".
        update: "standard"; "outside", which multiplies the erased part by l, too; "plain", l = 1.
        gates: one a "channel", that is a row of S, or "one" for a matrix.
        decay: l = 1 - b ("coupled"), or by weights of its own ("own").
        half_life: writes after which half is forgotten, at first; None for 512 tokens, and the released bias
            (3.4 writes) with write="segment". With decay="own", b begins with the released bias.
        correct: "queries", "output", or both.
        scale: s; 16 / r as released.
        channels: of the layer's input, where they are not D. The model gives them.
    """

    needs = frozenset({"state", "head", "queries"})

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        rank: int = 8,
        states: int = 1,
        write: Literal["token", "segment"] = "token",
        update: Literal["standard", "outside", "plain"] = "standard",
        gates: Literal["channel", "one"] = "channel",
        decay: Literal["coupled", "own"] = "coupled",
        half_life: float | None = None,
        correct: Sequence[Literal["queries", "output"]] = ("queries", "output"),
        scale: float = 2.0,
        channels: int | None = None,
    ) -> None:
        super().__init__()
        at_least_one(rank=rank, states=states)
        if half_life is not None and not 1 <= half_life < math.inf:
            raise ValueError(f"half_life={half_life} must be at least 1, in writes; None is the default of write")
        if not correct or not set(correct) <= {"queries", "output"}:
            raise ValueError(f"correct={correct!r} must name 'queries', 'output' or both")
        if update == "plain" and decay == "own":
            raise ValueError("decay='own': update='plain' has no decay; take decay='coupled'")
        channels, self.rank, self.states, self.scale = channels or width, rank, states, scale
        self.update, self.by_token, size = update, write == "token", states * rank
        self.gates, self.own_decay = states if gates == "one" else size, decay == "own"
        self.needs = frozenset({"state"} | {"head" if place == "output" else place for place in correct})
        count = self.gates * (2 if self.own_decay else 1)
        # No nn.Linear: its adapters would replace the weights that begin at 0.
        self.map_OD = nn.Parameter(torch.empty(3 * size + count, channels).uniform_(-1, 1) / channels**0.5)
        self.gate_bias_G = nn.Parameter(torch.empty(count))
        half_life = 512.0 if half_life is None and self.by_token else half_life
        forget = BIAS if half_life is None else math.log(math.expm1(math.log(2) / half_life))
        with torch.no_grad():
            self.map_OD[3 * size :] = 0
            self.gate_bias_G[: self.gates] = BIAS if self.own_decay else forget
            self.gate_bias_G[self.gates :] = -forget
        self.query_DC, self.output_DC = (
            nn.Parameter(_columns(torch.randn(rows, size))) if place in correct else None
            for place, rows in (("queries", width), ("output", channels))
        )
        if self.by_token:
            self.advance = _after

    def start_from(self, query: Callable[[int], Tensor], output: Callable[[int], Tensor]) -> None:
        """Begin with the first columns, (D, C) for a count of them, of the host's maps of queries and output."""
        for weight_DC, columns in ((self.query_DC, query), (self.output_DC, output)):
            if weight_DC is not None:
                with torch.no_grad():
                    weight_DC.copy_(_columns(columns(weight_DC.shape[1])))

    def init_state(self, batch_size: int, like: Tensor) -> DeltaState:
        dtype = torch.promote_types(like.dtype, torch.float32)
        matrix_BSVK = like.new_zeros(batch_size, self.states, self.rank, self.rank, dtype=dtype)
        return DeltaState(matrix_BSVK, torch.zeros(batch_size, dtype=torch.long, device=like.device))

    def open(self, state: DeltaState, first_B1P: Tensor | None, project_kv: ProjectKV | None) -> DeltaState:
        refuse_narrow(state.matrix_BSVK, "what delta-mem adds to its matrix")
        # where, not multiplication: no value of an empty state may reach a result, not even NaN
        any_B111 = (state.tokens_B > 0)[:, None, None, None]
        return state._replace(matrix_BSVK=torch.where(any_B111, state.matrix_BSVK, 0))

    def read(self, opened: DeltaState, query: Query, project_kv: ProjectKV | None) -> Reading:
        x_BND, size = shown(query.x_BND, query.padding_BN), self.rank * self.states
        t_BNO = wide(F.linear(x_BND, self.map_OD if self.by_token else self.map_OD[:size]))
        with torch.autocast(t_BNO.device.type, enabled=False):
            q_BSNK, *k = self._unit(t_BNO[..., : 2 * size]).split(self.states, 1)
            if self.by_token:
                writes = self._writes(k[0], t_BNO[..., 2 * size :], inside_BN := _inside(query))
                read_BNC, opened = self._scan(opened, q_BSNK, writes, inside_BN)
            else:
                read_BNC = (q_BSNK @ opened.matrix_BSVK.mT).transpose(1, 2).flatten(2)
        read_BNC = self.scale * read_BNC
        term_BND = None if self.query_DC is None else F.linear(read_BNC, wide(self.query_DC)).to(query.x_BND.dtype)
        any_B = None if self.by_token else opened.tokens_B > 0
        return Reading(carry=DeltaRead(read_BNC, opened), any_B=any_B, query_BND=term_BND)

    def project(self, y_BHNE: Tensor, query: Query, reading: Reading, linear: Linear, weights: Weights) -> Tensor:
        y_BND = super().project(y_BHNE, query, reading, linear, weights)
        if self.output_DC is None:
            return y_BND
        return y_BND + F.linear(reading.carry.read_BNC, wide(self.output_DC)).to(y_BND.dtype)

    def write(self, state: DeltaState, trace: Trace) -> tuple[DeltaState, None]:
        if self.by_token:
            return trace.reading.carry.after, None
        query, real_BN, size = trace.query, trace.query.real_BN, self.rank * self.states
        x_BND = wide(shown(query.x_BND, query.padding_BN))
        mean_B1D = (x_BND.sum(1) / real_BN.sum(1).clamp(min=1)[:, None])[:, None]
        t_B1O = F.linear(mean_B1D, wide(self.map_OD[size:]))
        with torch.autocast(t_B1O.device.type, enabled=False):
            k_BS1K = self._unit(t_B1O[..., :size])
            writes = self._writes(k_BS1K, t_B1O[..., size:], real_BN.any(1, keepdim=True))
            return self._scan(self.open(state, None, None), k_BS1K, writes, real_BN)[1], None

    def close_gate(self) -> None:
        with torch.no_grad():
            for weight_DC in (self.query_DC, self.output_DC):
                if weight_DC is not None:
                    weight_DC.zero_()

    def _unit(self, t_BNC: Tensor) -> Tensor:
        return F.normalize(t_BNC.unflatten(-1, (-1, self.rank)).transpose(1, 2).tanh(), dim=-1, eps=1e-6)

    def _writes(self, k_BSNK: Tensor, t_BNO: Tensor, written_BN: Tensor) -> list[Tensor]:
        """Keys, values, rates and logarithms of decays for `causal_scan`, from the maps; nothing where not written."""
        v_BNC, gate_BNG = t_BNO.split([self.rank * self.states, len(self.gate_bias_G)], -1)
        v_BGNV = v_BNC.unflatten(-1, (self.gates, -1)).transpose(1, 2)
        write_BGN1, *own = (gate_BNG + wide(self.gate_bias_G)).mT[..., None].split(self.gates, 1)
        g_BGN1, beta_BGN1 = F.logsigmoid(own[0] if own else -write_BGN1).clamp(min=LEAST), write_BGN1.sigmoid()
        if self.update == "standard":  # the erased read is of S before its decay
            v_BGNV, beta_BGN1 = v_BGNV * g_BGN1.exp(), beta_BGN1 * (-g_BGN1).exp()
        elif self.update == "plain":
            g_BGN1 = torch.zeros_like(g_BGN1)
        hidden_B1N1 = ~written_BN[:, None, :, None]
        beta_BGN1, g_BGN1 = (t.masked_fill(hidden_B1N1, 0) for t in (beta_BGN1, g_BGN1))
        return [k_BSNK.repeat_interleave(self.gates // self.states, 1), v_BGNV, beta_BGN1, g_BGN1]

    def _scan(
        self, state: DeltaState, q_BSNK: Tensor, writes: list[Tensor], counted_BN: Tensor
    ) -> tuple[Tensor, DeltaState]:
        """r of the tokens, (B, N, C), and the state after them."""
        matrix_BGKV = state.matrix_BSVK.reshape(len(q_BSNK), self.gates, -1, self.rank).mT
        q_BGNK = q_BSNK.repeat_interleave(self.gates // self.states, 1)
        if q_BGNK.shape[2] == 1:
            k, v, beta, g = writes
            out_BGNV, kept = q_BGNK @ matrix_BGKV, matrix_BGKV * g.exp()
            matrix_BGKV = kept + k.mT @ (beta * (v - k @ kept))
        else:
            q, (k, v, beta, g) = F.pad(q_BGNK, (0, 0, 0, 1)), (F.pad(t, (0, 0, 1, 0)) for t in writes)
            out_BGLV, matrix_BGKV = causal_scan(q, k, v, matrix_BGKV, beta_BHN1=beta, log_decay_BHNG=g, chunk=32)
            out_BGNV = out_BGLV[:, :, :-1]
        after = DeltaState(matrix_BGKV.mT.reshape(state.matrix_BSVK.shape), state.tokens_B + counted_BN.sum(1))
        return out_BGNV.transpose(1, 2).flatten(2), after


def _columns(weight_DC: Tensor) -> Tensor:
    """The columns with a length of `GAIN`; 0 stays 0."""
    return GAIN * F.normalize(weight_DC, dim=0)


def _after(opened: Any, x_BND: Tensor, traces: Sequence[Trace]) -> DeltaState:
    """`advance`: S after the tokens that were read."""
    return traces[0].reading.carry.after  # type: ignore[no-any-return]


def _inside(query: Query) -> Tensor:
    """(B, N) bool: real tokens of the segment, which write; memory tokens around it do not."""
    if query.segment is None:
        return query.real_BN
    start, length = query.segment
    places_N = torch.arange(query.x_BND.shape[1], device=query.x_BND.device)
    return query.real_BN & (places_N >= start) & (places_N < start + length)
