"""Memory Caching (Behrouz et al. 2026, arXiv:2602.24281; the authors have published no code): a recurrent memory whose
state at the end of every segment is kept, and read beside the one that goes on.

    M_t = f(M_{t-1}; k_t, v_t)                            any recurrence: the memory `over`, as it is
    M_0 of segment s = M_end of segment s - 1 ("checkpoint"),   or the initial state ("restart")

    residual    y_t = M_t(q_t) + sum_i M^i(q_t)                                      M^i: snapshot of segment i
    gated       y_t = g_t M_t(q_t) + sum_i g_i M^i(q_t),   g = softmax(<u_t, c_t>, <u_t, c^1>, ...),   u_t = x_t W_u
    sparse      the same over the online state and the k snapshots with the largest <u_t, c^i>
    soup        y_t = M(q_t), M of the parameters g_t M_t + sum_i g_i M^i

With keep="powers" the snapshots are sums over 1, 2, 4, 8, ... segments, the newest first, each there or not as
the binary digits of the number of segments, as in log-linear attention (Guo et al. 2025, arXiv:2506.04761), segment by
segment. A segment's end is added to the snapshots that it carries over into the next digit, so that the memory below
must be a sum over tokens.

c^i is the mean of the keys of segment i, c_t that of its own segment's keys up to and with token t. With a memory that
is linear in its state, soup is gated. Otherwise a soup has its own state for each token, which is never formed: a mixed
matrix gives sum_i g_i x W^i for x, layer by layer. Of Infini-attention the sums s(q) M and s(q) z are mixed, and the
quotient is taken of the mix; its M_t is that of before the segment.

Legend: B rows, N tokens, S slots, G groups (heads, or nets), K width of keys, F of answers, D model width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.attentions.parts.building_blocks import wide
from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.incremental import advance, needs_whole_segments, open_segment
from cached_transformers.interfaces.memory import LayerMemory, Linear, ProjectKV, Query, Reading, Trace
from cached_transformers.interfaces.probing import Probing
from cached_transformers.linear_maps import Weights
from cached_transformers.registry import MEMORIES
from cached_transformers.state import State, may_change, refuse_narrow, reset

from .parts.factory import create_memory, memory_spec
from .parts.recurrent import Answer, Recurrent, full_precision, mix, wrote


class CachedStates(NamedTuple):
    """The state that goes on, snapshots with contexts, and the number of segments n.

    Segment i is in slot i mod S; with keep="powers" slot l holds 2^l segments where digit l of n is 1, and the last
    slot all older ones.
    """

    online: State
    snapshots_BS: Tensor
    contexts_BSGK: Tensor
    segments_B: Tensor


class OpenedSnapshots(NamedTuple):
    """Snapshots and contexts of a segment, 0 where a slot is empty (None: no slot is), rows with any, the memory below
    as it was opened, mean and number of the segment's keys; and all `matrices` of single tokens, (B, G, S K, F)."""

    snapshots_BS: Tensor
    contexts_BGKS: Tensor
    empty_BS: Tensor | None
    any_B: Tensor
    online: Any
    mean_BGK: Tensor
    tokens: int
    matrices_BGKF: Tensor | None = None


class Carried(NamedTuple):
    """State of the wrapped memory, the mean of the segment's keys, and the rows with an answer (None: all)."""

    inner: Any
    context_BGK: Tensor
    any_B: Tensor | None


def running_means(k_BGNK: Tensor, shown_BN: Tensor | None, mean_BGK: Tensor, before: int) -> Tensor:
    """Means of the keys up to each token, itself included, of those that are shown; 0 where there is none yet.

    Args:
        mean_BGK, before: mean and number of earlier keys; without `shown_BN`.
    """
    if shown_BN is None:
        if k_BGNK.shape[2] == 1:
            return torch.lerp(mean_BGK[:, :, None], k_BGNK, 1 / (before + 1))
        tokens = torch.arange(before + 1, before + k_BGNK.shape[2] + 1, device=k_BGNK.device)[:, None]
        return (k_BGNK.cumsum(2) + before * mean_BGK[:, :, None]) / tokens
    shown_B1N1 = shown_BN[:, None, :, None]
    return torch.where(shown_B1N1, k_BGNK, 0).cumsum(2) / shown_B1N1.cumsum(2).clamp(min=1)


def gates(
    u_BGNK: Tensor, contexts_BGKS: Tensor, current_BGNK: Tensor, empty_BS: Tensor | None, topk: int | None = None
) -> Tensor:
    """Weights (B, G, N, S + 1) of (`topk`) snapshots and, last, of the online state: a softmax of <u, c>."""
    if empty_BS is None and topk is None and u_BGNK.shape[2] == 1:
        return (u_BGNK @ torch.cat([contexts_BGKS, current_BGNK.mT], -1)).softmax(-1)
    logits_BGNS = u_BGNK @ contexts_BGKS
    if empty_BS is not None:
        logits_BGNS = logits_BGNS.masked_fill(empty_BS[:, None, None], -torch.inf)
    if topk is not None and topk < logits_BGNS.shape[-1]:
        best_BGNS = logits_BGNS.topk(topk).indices
        dropped_BGNS = torch.ones_like(logits_BGNS, dtype=torch.bool).scatter(-1, best_BGNS, False)
        logits_BGNS = logits_BGNS.masked_fill(dropped_BGNS, -torch.inf)
    online_BGN1 = (u_BGNK * current_BGNK).sum(-1, keepdim=True)
    return torch.cat([logits_BGNS, online_BGN1], -1).softmax(-1)


def digits(segments_B: Tensor, slots: int) -> Tensor:
    """(B, S) long: binary digits of the numbers, the lowest first; the last place has all that is left."""
    left_BS = segments_B[:, None] >> torch.arange(slots, device=segments_B.device)
    return torch.cat([left_BS[:, :-1] % 2, left_BS[:, -1:]], 1)


def snapshot_memories() -> list[str]:
    """Names of the memories whose snapshots can be read."""
    kinds = ((entry.name, entry.factory) for entry in MEMORIES)
    return [name for name, kind in kinds if isinstance(kind, type) and issubclass(kind, Recurrent)]


def _one_snapshot(segment: int, distance: int, depth: int) -> Mapping[str, Any]:
    """A layer knows one segment before its own, so that N of them reach N segments back."""
    if distance <= depth:
        raise ValueError(
            f"distance={distance} is within reach of one snapshot in {depth} layers; take at least {depth + 1}"
        )
    return {"slots": 1, "start": "restart"}


@MEMORIES.register(
    "memory_caching",
    paper="arXiv:2602.24281",
    title="Memory Caching",
    carries="another memory's state at the end of each of the last S segments, and the mean key of each, by which "
    "tokens choose among them",
    purpose="associations, more than a state holds",
    equations="y = g_t M_t(q) + sum_i g_i M^i(q), M^i the state that segment i has left, g = softmax(<x W_u, c>), "
    "c the segment's mean key; residual: g = 1; sparse: the best k; soup: states are mixed, then read",
    state="per row and layer: that of the memory `over`, 8 bytes, and S snapshots of 4 (D E + D) bytes over infini, "
    "4 G P over titans and ttt; and 4 S D but for residual",
    cost="per token and layer, beside that of the memory `over`: S (D E + D) over infini, S G P over titans and ttt; "
    "and D^2 + S D (gates) but for residual multiply-adds",
    reach="that of the memory `over`; with start='restart' S segments a layer, unbounded with keep='powers'",
    gradient="through online state, snapshots and contexts, over `bptt` segments",
    probe=Probing(lambda segment, distance, depth: {"slots": distance + 1}, _one_snapshot),
)
class MemoryCaching(LayerMemory):
    """A recurrent memory of a layer whose states at segment ends are kept, and read beside the one that goes on.

    With no snapshot, in a row's first segment, or with slots=0, it is the memory below. A segment of padding alone
    is not stored.

    Args:
        width: D. heads: H.
        over: the memory below, a name or {"name": ..., option: value}: one whose states can be asked (infini, ttt, or
            titans but with place="context").
        slots: S, snapshots that are kept.
        keep: snapshots of the "last" S segments; or sums over 1, 2, 4, ... segments ("powers"), the last slot over all
            older ones, for a memory whose state is a sum over tokens (infini, update="linear") and start="restart".
        read: how snapshots and online state are mixed: "residual", "gated", "soup" or "sparse".
        start: with which state a segment begins: that of the last one's end ("checkpoint"), or an empty one
            ("restart").
        topk: k, snapshots that "sparse" mixes.
        channels: of the layer's input, where they are not D. facts: for the memory below. The model gives them.
    """

    needs = frozenset({"state", "head"})

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        over: str | dict[str, Any] = "infini",
        slots: int = 16,
        read: Literal["residual", "gated", "soup", "sparse"] = "gated",
        start: Literal["checkpoint", "restart"] = "checkpoint",
        topk: int = 2,
        keep: Literal["last", "powers"] = "last",
        channels: int | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        at_least_one(topk=topk)
        if slots < 0:
            raise ValueError(f"slots={slots} must not be negative; slots=0 keeps no snapshot")
        self.over = _memory_below(over, width, heads, facts or {})
        self.soup = read == "soup" and not self.over.linear
        if self.soup and type(self.over).soup is Recurrent.soup:
            raise ValueError(
                f"read='soup' mixes states number by number, which {type(self.over).__name__} cannot be asked for with "
                "these options; take read='gated', which mixes answers"
            )
        self.merges = keep == "powers"
        if self.merges and not (self.over.sums_tokens and start == "restart" and slots):
            raise ValueError(
                f"keep='powers' adds states, which over={over!r}, start={start!r}, slots={slots} does not allow; take "
                "over='infini' with update='linear', start='restart' and at least one slot"
            )
        self.needs, self.slots, self.restarts = self.over.needs, slots, start == "restart"
        if (whole := needs_whole_segments(self.over)) is not None:
            self.whole_segments = whole
        self.topk = topk if read == "sparse" else None
        self.key_width = 0 if read == "residual" else self.over.key_width
        self.look_for = (
            nn.Linear(channels or width, self.over.groups * self.key_width, bias=False) if self.key_width else None
        )

    def init_state(self, batch_size: int, like: Tensor) -> CachedStates:
        online = self.over.init_state(batch_size, like)
        empty_B = self.over.snapshot(online)
        contexts_BSGK = wide(like.new_zeros(batch_size, self.slots, self.over.groups, self.key_width))
        return CachedStates(
            online,
            empty_B.new_zeros(batch_size, self.slots, *empty_B.shape[1:]),
            contexts_BSGK,
            torch.zeros(batch_size, dtype=torch.long, device=like.device),
        )

    def open(self, state: CachedStates, first_B1P: Tensor | None, project_kv: ProjectKV | None) -> OpenedSnapshots:
        refuse_narrow(state, "the digits of the sums that Memory Caching keeps")
        online = open_segment(self.over, state.online, first_B1P, project_kv)
        slots_S = torch.arange(self.slots, device=state.segments_B.device)
        empty_BS = slots_S >= state.segments_B[:, None]
        if self.merges:
            empty_BS = digits(state.segments_B, self.slots) == 0
        # no product: no value of an empty slot may reach a result, not even NaN
        snapshots_BS, contexts_BSGK = (
            t.masked_fill(empty_BS.view(*empty_BS.shape, *[1] * (t.dim() - 2)), 0)
            for t in (state.snapshots_BS, state.contexts_BSGK)
        )
        contexts_BGKS, any_B = contexts_BSGK.permute(0, 2, 3, 1), ~empty_BS.all(1)
        none_BGK = wide(contexts_BGKS.new_zeros(contexts_BGKS.shape[:3]))
        return OpenedSnapshots(snapshots_BS, contexts_BGKS, empty_BS, any_B, online, none_BGK, 0)

    def read(self, opened: OpenedSnapshots | CachedStates, query: Query, project_kv: ProjectKV | None) -> Reading:
        if isinstance(opened, CachedStates):
            first_B1P = None if query.positions_BNP is None else query.positions_BNP[:, :1]
            opened = self.open(opened, first_B1P, project_kv)
        snapshots_BS, contexts_BGKS, empty_BS, any_B, online = opened[:5]
        asked = self.over.ask(online, query)
        keys_BGNK = wide(asked.k_BGNK[..., : self.key_width])
        means_BGNK = running_means(keys_BGNK, _shown(query), opened.mean_BGK, opened.tokens)
        if self.look_for is None:
            assert empty_BS is not None
            weights_BGNS = F.pad(~empty_BS, (0, 1), value=True)[:, None, None].to(snapshots_BS.dtype)
        else:
            u_BGNK = wide(self.look_for(query.x_BND)).unflatten(-1, (-1, self.key_width)).transpose(1, 2)
            with full_precision(u_BGNK):
                weights_BGNS = gates(u_BGNK, contexts_BGKS, means_BGNK, empty_BS, self.topk)
        if self.soup:
            found = self.over.soup(online, query, asked, snapshots_BS, weights_BGNS)
        elif opened.matrices_BGKF is not None:
            q_BGNK = (weights_BGNS[..., None] * asked.q_BGNK[..., None, :]).flatten(-2)
            with full_precision(q_BGNK):
                found = Answer(q_BGNK @ opened.matrices_BGKF, any_B)
        else:
            found = self.over.online(online, query, asked)
            answers_BSGNF = self.over.answer(snapshots_BS, asked)
            found = found._replace(answer_BGNF=mix(answers_BSGNF, found.answer_BGNF, weights_BGNS))
        if found.any_B is not None and found.any_B is not any_B:
            found = found._replace(any_B=found.any_B | any_B)
        reading = self.over.settle(found)
        return reading._replace(carry=Carried(reading.carry, means_BGNK[:, :, -1], found.any_B))

    def advance(self, opened: OpenedSnapshots, x_BND: Tensor, traces: Sequence[Trace]) -> OpenedSnapshots:
        trace = traces[0]
        online = advance(self.over, opened.online, x_BND, [trace._replace(reading=_below(trace.reading))])
        if opened.empty_BS is not None and not opened.tokens:  # slots empty in all rows cost later tokens nothing
            used_B = (~opened.empty_BS).sum(1)
            least, used = (0, self.slots) if self.merges else (int(used_B.min()), int(used_B.max()))
            snapshots_BS, contexts_BGKS = opened.snapshots_BS[:, :used], opened.contexts_BGKS[..., :used]
            empty_BS = None if least == used and self.look_for is not None else opened.empty_BS[:, :used]
            matrices, any_B = self.over.matrices(opened.online), opened.any_B
            if matrices is not None:
                matrices = torch.cat([snapshots_BS, matrices[:, None]], 1).transpose(1, 2).flatten(2, 3)
                any_B = trace.reading.carry.any_B
            snapshots_BS, contexts_BGKS = snapshots_BS.contiguous(), contexts_BGKS.contiguous()
            opened = OpenedSnapshots(snapshots_BS, contexts_BGKS, empty_BS, any_B, *opened[4:7], matrices)
        tokens = opened.tokens + (trace.query.segment or trace.x_BND.shape)[1]
        return opened._replace(online=online, mean_BGK=trace.reading.carry.context_BGK, tokens=tokens)

    def combine(self, y_BHNE: Tensor, query: Query, reading: Reading) -> Tensor:
        return self.over.combine(y_BHNE, query, _below(reading))

    def project(self, y_BHNE: Tensor, query: Query, reading: Reading, linear: Linear, weights: Weights) -> Tensor:
        return self.over.project(y_BHNE, query, _below(reading), linear, weights)

    def write(self, state: CachedStates, trace: Trace) -> tuple[CachedStates, Tensor | None]:
        after, loss = self.over.write(state.online, trace._replace(reading=_below(trace.reading)))
        wrote_B = wrote(trace.query.padding_BN, trace.x_BND)
        snapshots_BS, contexts_BSGK = state.snapshots_BS, state.contexts_BSGK
        snapshot_B, context_BGK = self.over.snapshot(after), trace.reading.carry.context_BGK
        if self.merges:
            snapshots_BS, contexts_BSGK = merged(state, snapshot_B, context_BGK, wrote_B)
        elif self.slots:
            slot_B = state.segments_B % self.slots
            in_place = may_change(snapshots_BS, contexts_BSGK)
            snapshots_BS = _put(snapshots_BS, snapshot_B, slot_B, wrote_B, in_place)
            contexts_BSGK = _put(contexts_BSGK, context_BGK, slot_B, wrote_B, in_place)
        if self.restarts:
            after = reset(after, self.over.init_state(len(wrote_B), trace.x_BND), wrote_B)
        return CachedStates(after, snapshots_BS, contexts_BSGK, state.segments_B + wrote_B), loss

    def close_gate(self) -> None:
        self.over.close_gate()


def _memory_below(over: str | dict[str, Any], width: int, heads: int, facts: Mapping[str, Any]) -> Recurrent:
    """The memory whose states are kept."""
    fit = f"take one of {', '.join(snapshot_memories())}"
    try:
        spec = memory_spec(over)
    except ValueError as wrong:
        raise ValueError(f"over={over!r}: {wrong}; {fit}") from None
    if spec is None:
        raise ValueError(f"over={over!r} names no memory whose states could be kept; {fit}")
    name, options = spec
    kind = MEMORIES.entry(name).factory
    if not (isinstance(kind, type) and issubclass(kind, Recurrent)):
        raise ValueError(
            f"over={name!r} has no recurrent state for snapshots: memory_caching wraps layer "
            f"memories that read one state per head; {fit}"
        )
    memory: Recurrent = create_memory({"name": name, **options}, width, heads, **facts)  # type: ignore[assignment]
    if memory.no_snapshots is not None:
        raise ValueError(f"over={name!r} has no states that memory_caching could ask: {memory.no_snapshots}")
    return memory


def _below(reading: Reading) -> Reading:
    """The reading as the memory below gave it."""
    return reading._replace(carry=reading.carry.inner)


def _shown(query: Query) -> Tensor | None:
    """(B, N), the tokens whose keys are written: those of the segment without padding. None for all."""
    n = query.x_BND.shape[1]
    start, length = query.segment or (0, n)
    if length == n:
        return None if query.padding_BN is None else ~query.padding_BN
    place_N = torch.arange(n, device=query.x_BND.device)
    shown_BN = ((place_N >= start) & (place_N < start + length)).expand(len(query.x_BND), -1)
    return shown_BN if query.padding_BN is None else shown_BN & ~query.padding_BN


def _put(ring_BS: Tensor, new_B: Tensor, slot_B: Tensor, wrote_B: Tensor, in_place: bool) -> Tensor:
    """The ring with the new one in its slot, in rows that wrote."""
    new_B1 = new_B[:, None].to(ring_BS.dtype)
    index_B1 = slot_B.view(-1, *[1] * (ring_BS.dim() - 1)).expand_as(new_B1)
    new_B1 = torch.where(wrote_B.view(-1, *[1] * (ring_BS.dim() - 1)), new_B1, ring_BS.gather(1, index_B1))
    return (ring_BS.scatter_ if in_place else ring_BS.scatter)(1, index_B1, new_B1)


def merged(state: CachedStates, snapshot_B: Tensor, context_BGK: Tensor, wrote_B: Tensor) -> tuple[Tensor, Tensor]:
    """Snapshots, and mean keys by numbers of segments, after one segment more: digits that carry over."""
    slots_S = torch.arange(state.snapshots_BS.shape[1], device=wrote_B.device)
    digits_BS = digits(state.segments_B, len(slots_S))
    full_BS = digits_BS[:, :-1] != 0  # which digit takes the sum: the first 0, or the last of all
    place_B1 = full_BS.long().cumprod(1).sum(1, keepdim=True)
    taken_BS = (slots_S <= place_B1) & (digits_BS != 0) & wrote_B[:, None]
    here_BS = (slots_S == place_B1) & wrote_B[:, None]
    counts_BS = (digits_BS << slots_S) * taken_BS

    def put(slots_BS: Tensor, new_B: Tensor, counts_BS: Tensor | None) -> Tensor:
        def shaped(t: Tensor) -> Tensor:
            return t.view(*t.shape, *[1] * (slots_BS.dim() - t.dim()))

        # where, not multiplication: no value of an empty slot may reach a result, not even NaN
        moved_BS = torch.where(shaped(taken_BS), slots_BS, 0)
        if counts_BS is not None:
            moved_BS = moved_BS * shaped(counts_BS)
        sum_B1 = moved_BS.sum(1, keepdim=True) + new_B[:, None]
        if counts_BS is not None:
            sum_B1 = sum_B1 / shaped(counts_BS.sum(1, keepdim=True) + 1)
        return torch.where(shaped(here_BS), sum_B1, torch.where(shaped(taken_BS), 0, slots_BS)).to(slots_BS.dtype)

    return put(state.snapshots_BS, snapshot_B, None), put(state.contexts_BSGK, context_BGK, counts_BS)
