"""Artificial hippocampus networks, AHN (Fang, Yu, Zhong, Ye, Xiong and Wei 2025, arXiv:2510.07318;
github.com/ByteDance-Seed/AHN).

A window of keys and values with sinks is exact; what leaves it goes, oldest first, into a matrix of each head:

    M <- e^(g_j) M;   M <- M + b_j k_j (v_j - M^T k_j)^T         of token j; b_j = sigmoid(W_b x_j), g_j <= 0 from x_j
    m_t = (rms(M^T q_t / sqrt(E)) w SiLU(W_g x_t)) O             q, k of length 1; O (E, E) a head, zeros at first
    o_t = A_t + m_t                                              A: softmax over sinks, window and segment

As released, a token leaves as soon as the window is full. Here tokens leave when a segment ends: all tokens of a
segment read the same M, and every past token is in exactly one of sinks, window and M. Segments of one token are the
released form. Keys in M have no positions, since those of the window are places in the cache. Half-lives of g begin
between 64 and 4,096 tokens; as released, half of them are shorter than 10.

Legend: B rows, N tokens, M slots, L slots and tokens, H heads, G heads of keys, E head width, D = H E model width,
W = 2 G E + 2 H numbers of a slot in the window.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.attentions.parts.building_blocks import unit, wide
from cached_transformers.attentions.parts.decay import InputDecay, check_half_life
from cached_transformers.interfaces.memory import Context, ProjectKV, Query, Reading, Trace
from cached_transformers.interfaces.probing import Probing, fixed
from cached_transformers.registry import MEMORIES
from cached_transformers.state import refuse_narrow

from .parts.fifo_store import Pairs, Rows, empty_pairs, keys_values, push, push_out, side_by_side, stored_pair
from .parts.options import check_heads
from .parts.recurrent import corrected, shown
from .parts.sinks import placed
from .transformer_xl import TransformerXL


class AHNState(NamedTuple):
    """Keys and values of the sinks; those of the window, with b and g; M, and how many tokens it holds."""

    sinks: Pairs
    recent: Rows
    matrix_BHEE: Tensor
    left_B: Tensor


class OpenedAHN(NamedTuple):
    """Sinks and window as slots; M, and the rows in which it holds something."""

    slots: Context
    matrix_BHEE: Tensor
    any_B: Tensor


@MEMORIES.register(
    "ahn",
    paper="arXiv:2510.07318",
    title="Artificial Hippocampus Networks",
    carries="keys and values of the first and the last tokens, and a matrix in each head for those between",
    purpose="streams of any length through a pretrained decoder, with a window and a trained summary of the rest",
    equations="o_t = attention over [sinks, window, segment] + (rms(M^T q_t / sqrt(E)) w SiLU(W_g x_t)) O; for a token "
    "that leaves the window M <- e^g M + b k (v - e^g M^T k)^T; k and q of length 1",
    state="per row and layer, in float32: S (8 G E + 8) + R (8 G E + 8 H + 8) + 4 D E + 24 bytes, E = D / H",
    cost="per token and layer: 3 (S + R) D (slots), 3 D H (gates), 2 D E (read) and 2 D (E + C), C = min(64, N), "
    "(write) multiply-adds",
    reach="the first S and the last R tokens, and as far as decay lets it",
    gradient="through M into b and g of tokens that leave within `bptt` segments; none into stored keys and values",
    probe=Probing(fixed()),
)
class AHN(TransformerXL):
    """A window with sinks, and a gated delta state of each head for the tokens that have left it.

    At first O is 0, and the layer computes the same as with `streaming_llm` and keep='kv'. Stored keys and values train
    no projection, so that it suits a frozen decoder. M is float32 at least.

    Args:
        width: D. heads: H.
        length: R, tokens of the window before the segment. sinks: S.
        half_life: of what M holds, at first, the least and the greatest; heads draw theirs log-uniform between.
        relative: see `TransformerXL`.
        channels: of the layer's input, where they are not D. The model gives them.
    """

    needs = frozenset({"state", "context", "head", "stored_kv"})

    def __init__(
        self,
        width: int,
        heads: int,
        length: int = 508,
        *,
        sinks: int = 4,
        half_life: tuple[float, float] = (64.0, 4096.0),
        relative: bool = True,
        channels: int | None = None,
    ) -> None:
        check_heads(width, heads)
        check_half_life(half_life)
        super().__init__(width, heads, length, relative=relative, keep="kv", sinks=sinks)
        size, channels = width // heads, channels or width
        self.decay = InputDecay(channels, heads, 1, gate="softplus", rank=None, half_life=half_life, least_rate=0.0)
        self.share, self.gate = (nn.Linear(channels, heads, bias=False) for _ in range(2))
        self.norm_E = nn.Parameter(torch.ones(size))
        self.output_HEE = nn.Parameter(torch.zeros(heads, size, size))

    def init_state(self, batch_size: int, like: Tensor) -> AHNState:
        groups, size = self.stored_heads
        sinks, recent = (empty_pairs(batch_size, slots, groups * size, like) for slots in (self.sinks, self.length))
        gates_BM2H = like.new_zeros(batch_size, self.length, 2 * self.heads)
        rows = Rows(torch.cat([recent.pairs_BMW, gates_BM2H], -1), *recent[1:])
        dtype = torch.promote_types(like.dtype, torch.float32)
        matrix_BHEE = like.new_zeros(batch_size, self.heads, size, size, dtype=dtype)
        return AHNState(sinks, rows, matrix_BHEE, torch.zeros_like(rows.count_B))

    def open(self, state: AHNState, first_B1P: Tensor | None, project_kv: ProjectKV | None) -> OpenedAHN:
        refuse_narrow(state.matrix_BHEE, "what AHN adds to its matrices")
        groups, size = self.stored_heads
        window = Pairs(state.recent.hidden_BMD[..., : 2 * groups * size], *state.recent[1:])
        slots = placed(state.sinks, window, first_B1P)
        k_BGME, v_BGME = keys_values(slots.pairs_BMW, groups)
        context = Context(k_BGME, v_BGME, slots.positions_BMP, slots.valid_BM, consecutive=True)
        return OpenedAHN(context, *self._held(state))

    def read(self, opened: OpenedAHN, query: Query, project_kv: ProjectKV | None) -> Reading:
        assert query.q_BHNE is not None
        gate_BHN1 = F.silu(wide(self.gate(shown(query.x_BND, query.padding_BN)))).mT[..., None]
        with torch.autocast(gate_BHN1.device.type, enabled=False):
            q_BHNE = unit(shown(query.q_BHNE, query.padding_BN))
            o_BHNE = F.rms_norm(q_BHNE @ opened.matrix_BHEE * q_BHNE.shape[-1] ** -0.5, q_BHNE.shape[-1:], eps=1e-5)
            output_BHNE = (o_BHNE * wide(self.norm_E) * gate_BHN1) @ wide(self.output_HEE)
        return Reading(opened.slots, output_BHNE, opened.any_B)

    def combine(self, y_BHNE: Tensor, query: Query, reading: Reading) -> Tensor:
        assert reading.output_BHNE is not None
        mixed_BHNE = y_BHNE + reading.output_BHNE.to(y_BHNE.dtype)
        return torch.where(reading.carry[:, None, None, None], mixed_BHNE, y_BHNE)

    def write(self, state: AHNState, trace: Trace) -> tuple[AHNState, None]:
        query = trace.query
        assert query.positions_BNP is not None
        pairs_BNW = side_by_side(*stored_pair(query, self.stored_heads[0]))
        x_BND = shown(query.x_BND, query.padding_BN)
        b_BNH, g_BNH = wide(self.share(x_BND)).sigmoid(), self.decay(x_BND)[0][..., 0].mT
        kept_BNW = torch.cat([pairs_BNW, b_BNH.to(pairs_BNW.dtype), g_BNH.to(pairs_BNW.dtype)], -1)
        real_BN = query.real_BN
        later_BN = state.sinks.count_B[:, None] + real_BN.cumsum(1) > self.sinks
        sinks = push(Rows(*state.sinks), pairs_BNW, query.positions_BNP, ~real_BN | later_BN)
        recent, left = push_out(state.recent, kept_BNW, query.positions_BNP, ~(real_BN & later_BN))
        return AHNState(Pairs(*sinks), recent, self._absorbed(state, left), state.left_B + left.count_B), None

    def _held(self, state: AHNState) -> tuple[Tensor, Tensor]:
        # where, not multiplication: no value of an empty state may reach a result, not even NaN
        any_B = state.left_B > 0
        return torch.where(any_B[:, None, None, None], state.matrix_BHEE, 0), any_B

    def _absorbed(self, state: AHNState, left: Rows) -> Tensor:
        """M after the tokens that have left the window."""
        groups, size = self.stored_heads
        pairs_BNW, gates_BNH = wide(left.clean_BMD).split([2 * groups * size, 2 * self.heads], -1)
        k_BHNE, v_BHNE = (t.repeat_interleave(self.heads // groups, 1) for t in keys_values(pairs_BNW, groups))
        b_BHN1, g_BHN1 = (t.mT[..., None] for t in gates_BNH.chunk(2, -1))
        matrix_BHEE, _ = self._held(state)
        return corrected(matrix_BHEE, k_BHNE, v_BHNE, b_BHN1, g_BHN1)
