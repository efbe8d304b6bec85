"""Incremental decoding within a partial segment: a KV cache per layer, memories opened once, one token per step.

The first tokens run through the stack as a segment does and leave what later tokens need: the opened memory, keys with
their positions (the context's first), or the state of the attention. Later tokens come one at a time for each of K
continuations of a row, side by side as (B, K, D); a mask says which slots each continuation sees.

Multiply-adds of a token: 4 D^2 (projections) + 2 (M + S) D (attention over M slots of the context and S tokens of the
segment) + the memory's `read` of one token.

Legend: B rows, K continuations, R = B K, N tokens, M slots of the context, S slots in all, H heads, E head width,
D model width, P position channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.attentions.softmax import log_sum_exp
from cached_transformers.interfaces.attention import Attention
from cached_transformers.interfaces.contexts import logits_of
from cached_transformers.interfaces.incremental import advance, needs_whole_segments, open_segment
from cached_transformers.interfaces.memory import Context, LayerMemory, Offer, Query, Reading, Tokens, Trace
from cached_transformers.linear_maps import plain_weights
from cached_transformers.memories.parts.composite import SideBySide, members_of, stands_in_front
from cached_transformers.positions import Positions, alike
from cached_transformers.state import State, reorder, repeat

from .attention import Attended, SelfAttention
from .block import Block
from .context_attention import ContextAttention
from .decoder_block import KeysValues
from .kv_cache import Continuations, KVCache, as_rows, own_slots, select_rows, side_by_side
from .short_convolution import ShiftedState, ShortConvolution, begun
from .stack import Stack, StackState


class LayerDecoder:
    """Cached keys, opened memory and state of one layer within a partial segment.

    Args:
        attention: the layer, in evaluation mode.
        state: of its memory and attention mechanism, R rows.
        text: the slots that each continuation sees.
        open_positions: opens a position scheme; the flag says whether all keys are consecutive.
        steps: tokens to reserve room for.

    Attributes:
        reader: memory that later tokens read; an empty one if no row has a memory to read.
        context_visible: (B, K, M) bool, slots of the context that each continuation sees; None for all.
        context_bias: (B, H, 1, K M), added to the logits of these slots; None for nothing.
        context_slots: slots of the context, before the slots of the text.
        positions_BSP: positions of all slots, where bias or window need them.
        context_keys: keys of the contexts at the first token, to detect another context; None after rows have moved.
        opened_slots: prepared slots of a model memory; None to prepare them at the next token.
        per_continuation: whether contexts and slots have a row per continuation instead of one per text.
        own_memory: the same of the opened memory.
    """

    def __init__(
        self,
        attention: SelfAttention,
        state: State,
        text: Continuations,
        open_positions: Callable[[Positions, bool], Positions],
        steps: int,
    ) -> None:
        self.attention, self.text = attention, text
        self.recent_RTD: State = ()  # last inputs of a short convolution
        if isinstance(state, ShiftedState):
            self.recent_RTD, state = state
        self.state, self.shifted = state, False
        self.positions, self.open_positions = attention.positions, open_positions
        self.patterned = type(attention.core).sees is not Attention.sees
        self.memory: LayerMemory = attention.memory
        self.reader = self.memory
        self.begun, self.opened, self.core_state = False, None, ()
        self.kv_cache = KVCache(steps)
        self.context: Context | None = None
        self.offer: Offer | None = None
        self.context_visible: Tensor | None = None
        self.context_bias: Tensor | None = None
        self.context_slots = 0
        self.positions_BSP: Tensor | None = None
        self.context_keys: list[Tensor | None] | None = None
        self.opened_slots: Any = None
        self.rows = text.rows
        self.per_continuation = self.own_memory = text.count > 1

    def __call__(self, x_BND: Tensor, positions_BNP: Tensor, *, context: Offer | None = None, **first: Any) -> Attended:
        """Attention output of the next tokens.

        Args:
            x_BND: the segment's first tokens, (R, N, D); afterwards the next token of each continuation, (B, K, D).
            positions_BNP: of the tokens.
            context: from a model memory; the same one during the segment.
            first: further arguments of `SelfAttention.forward` for the first tokens.

        Raises:
            ValueError: the context has changed.
        """
        if isinstance(self.attention, ContextAttention):  # caches no tokens, and gets a new context at each step
            return self.attention(x_BND, positions_BNP, state=self.state, context=context)  # type: ignore[no-any-return]
        if self.begun:
            return self._next(x_BND, positions_BNP, context)
        self.begun, self.offer = True, context
        self.first_BNP = positions_BNP
        return self.attention(x_BND, positions_BNP, state=self.state, context=context, keep=self, **first)  # type: ignore[no-any-return]

    def shift(self, convolution: ShortConvolution, x: Tensor, segment: tuple[int, int] | None) -> Tensor:
        """Apply a short convolution to the next tokens: (R, N, D) first, then (B, K, D)."""
        assert isinstance(self.recent_RTD, Tensor)
        x_RND = x.reshape(len(self.recent_RTD), -1, x.shape[-1]) if self.shifted else x
        y_RND, self.recent_RTD = convolution(x_RND, self.recent_RTD, segment=None if self.shifted else segment)
        self.shifted = True
        return y_RND.view_as(x)

    # `Keeper`: called by the layer for the first tokens

    def open(self, state: State, query: Query) -> Reading:
        assert query.positions_BNP is not None
        self.opened = open_segment(self.memory, state, query.positions_BNP[:, :1], self.attention.project_kv)
        reading = self.memory.read(self.opened, query, self.attention.project_kv)
        self._advance(query, reading)
        self.context_keys = _context_keys(self.memory, reading)
        if reading.context is None and reading.any_B is not None and not bool(reading.any_B.any()):
            self.reader = LayerMemory()
        return reading

    def take(self, k_BHNE: Tensor, v_BHNE: Tensor, context: Context | None, core_state: State) -> None:
        if context is not None and context.gather is not None:
            raise ValueError(f"memory {type(self.memory).__name__} gathers wide values, which no single token can read")
        if context is not None and not bool(context.valid_BM.any()):
            context = None
        self.context = context
        self._open_positions()
        if self.attention.core.steps_from == "state":
            self.core_state = core_state
            return
        k, b = self.text.count, k_BHNE.shape[0] // self.text.count
        positions_BSP = self.first_BNP.reshape(b, -1, self.first_BNP.shape[-1])
        if context is not None:
            keys, values, positions_BMP, valid_BM = (t.expand(b * k, *t.shape[1:]) for t in context[:4])
            self.kv_cache.extend(KeysValues(side_by_side(keys, k), side_by_side(values, k)), k)
            if context.bias_BHM is not None:
                self.context_bias = side_by_side(context.bias_BHM.expand(b * k, -1, -1)[..., None], k).mT
            valid = valid_BM.reshape(b, 1, -1)
            if k > 1 or not bool(valid_BM.all()):
                self.context_visible = valid & own_slots(k, valid_BM.shape[1], valid.device)
            positions_BMP = positions_BMP.reshape(b, -1, positions_BMP.shape[-1])
            positions_BSP = torch.cat([positions_BMP, positions_BSP], 1)
            self.context_slots = positions_BMP.shape[1]
        biased = type(self.positions).bias is not Positions.bias or self.memory.window() is not None
        self.positions_BSP = positions_BSP if biased else None
        self.kv_cache.extend(KeysValues(side_by_side(k_BHNE, k), side_by_side(v_BHNE, k)), k)

    def _open_positions(self) -> None:
        consecutive = self.context is None or self.context.consecutive
        self.positions = self.open_positions(self.attention.positions, consecutive)

    # later tokens

    def _next(self, x_BKD: Tensor, positions_BKP: Tensor, offer: Offer | None) -> Attended:
        layer, core = self.attention, self.attention.core
        h_BKD = layer.norm(x_BKD)
        q, k, v = layer._split(layer.qkv(h_BKD))
        if layer.query_factor != 1:
            q = q * layer.query_factor
        query = asked = Query(h_BKD, q, positions_BKP, None, None, k, v)
        if self.own_memory:  # one token per row
            x, positions = (t.flatten(0, 1)[:, None] for t in (h_BKD, positions_BKP))
            asked = Query(x, as_rows(q), positions, None, None, as_rows(k), as_rows(v))
        reading = self.reader.read(self.opened, asked, layer.project_kv)
        self._advance(asked, reading)
        if reading.query_BND is not None:
            q = layer.corrected(q, reading.query_BND)
        keys = _context_keys(self.reader, reading)
        self.context_keys = keys if self.context_keys is None else self.context_keys
        if offer is not self.offer or any(a is not b for a, b in zip(keys, self.context_keys, strict=True)):
            raise ValueError(
                f"layer memory {type(self.memory).__name__}, or the model memory, changed its context within a "
                "segment; a memory with open() makes its context there, once"
            )
        placed_q, placed_k = self.positions.query(q, positions_BKP), self.positions.rotate(k, positions_BKP)
        if core.steps_from == "state":
            q_rows, k_rows, v_rows = (as_rows(t) for t in (placed_q, placed_k, v))
            y, self.core_state = core.scan(q_rows, k_rows, v_rows, self.core_state, x_BND=h_BKD.flatten(0, 1)[:, None])
            y_BHKE = y.unflatten(0, h_BKD.shape[:2])[:, :, :, 0].transpose(1, 2)
        else:
            y_BHKE, lse_BHK = self._attend(q, placed_q, KeysValues(placed_k, v), positions_BKP, reading.context)
            if lse_BHK is not None:
                lse_BHN = as_rows(lse_BHK[..., None])[..., 0] if self.own_memory else lse_BHK
                reading = reading._replace(lse_BHN=lse_BHN)
        y = as_rows(y_BHKE) if self.own_memory else y_BHKE
        y_BKD = self.reader.project(y, asked, reading, layer.output, plain_weights(layer.output))
        return Attended(y_BKD.view_as(x_BKD), query, reading, None)

    def _advance(self, query: Query, reading: Reading) -> None:
        if self.reader is self.memory:
            trace = Trace(query.x_BND, query.x_BND, query, reading)
            self.opened = advance(self.memory, self.opened, query.x_BND, [trace])

    def _attend(
        self, q: Tensor, placed_q: Tensor, new: KeysValues, positions_BKP: Tensor, read: Context | None
    ) -> tuple[Tensor, Tensor | None]:
        """Attention over context and cached keys, and the log-sum-exp of the logits if the memory needs it."""
        k, v = self.kv_cache.extend(new)
        bias = None
        if self.positions_BSP is not None:
            self.positions_BSP = torch.cat([self.positions_BSP, positions_BKP], 1)
            run = self.text.count == 1 and (self.context is None or self.context.consecutive)
            bias = self.positions.bias(q, positions_BKP, self.positions_BSP, causal_run=run)
        mask = self._visible(positions_BKP)
        logits = self._visible_logits(read, k.shape[2])
        if logits is not None:
            bias = logits if bias is None else bias + logits
        if self.context_bias is not None:
            slots = F.pad(self.context_bias, (0, k.shape[2] - self.context_slots))
            bias = slots if bias is None else bias + slots
        if bias is not None:
            bias = bias.to(q.dtype)
            mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
        lse = log_sum_exp(placed_q, k, mask) if "lse" in self.reader.needs else None
        return F.scaled_dot_product_attention(placed_q, k, v, attn_mask=mask), lse

    def _visible(self, positions_BKP: Tensor) -> Tensor | None:
        """(B or 1, H or 1, K, S): the slots that each continuation sees; None for all."""
        text, mask = self.text, None
        if self.context_visible is not None:
            mask = torch.cat([self.context_visible.expand(-1, text.count, -1), text.visible_BKS], 2)[:, None]
        elif text.count > 1:
            mask = F.pad(text.visible_BKS, (self.context_slots, 0), value=True)[:, None]
        near_HS = self.attention.core.sees(text.step - 1, text.step_S) if self.patterned else None
        if near_HS is not None:
            near = F.pad(near_HS.view(1, -1, 1, near_HS.shape[-1]), (self.context_slots, 0), value=True)
            mask = near if mask is None else mask & near
        window = self.memory.window()
        if window is not None:
            assert self.positions_BSP is not None
            close = (positions_BKP[..., :1] - self.positions_BSP[:, None, :, 0] < window)[:, None]
            mask = close if mask is None else mask & close
        return mask

    def _visible_logits(self, read: Context | None, slots: int) -> Tensor | None:
        """(B or 1, 1, K, S): added to the logits where tokens see fractions of slots; None for nothing."""
        if self.context is None or read is None or read.visible_BHNM is None:
            return None
        logits_BHKM, count = logits_of(read.visible_BHNM), self.text.count
        if self.per_continuation:
            logits_BHKM = logits_BHKM.view(-1, 1, count, logits_BHKM.shape[-1])
        own = self.context_slots // (count if self.per_continuation else 1)
        logits_BHKM = F.pad(logits_BHKM, (0, own - logits_BHKM.shape[-1]))  # slots of a model memory come last
        if self.per_continuation:  # `context_visible` hides the slots of other continuations
            logits_BHKM = logits_BHKM.repeat(1, 1, 1, count)
        return F.pad(logits_BHKM, (0, slots - self.context_slots))

    def look(self, slot_attention: nn.Module, slots: tuple[Any, ...], x_BND: Tensor) -> Tensor:
        """Cross-attention of the tokens over the slots of a model memory, whose keys and values are made once."""
        if not hasattr(slot_attention, "open"):
            return slot_attention(x_BND, *slots)  # type: ignore[no-any-return]
        if self.opened_slots is None:
            self.opened_slots = slot_attention.open(*slots)  # type: ignore[operator]
        read: Callable[..., Tensor] = slot_attention.read  # type: ignore[assignment]
        if len(self.opened_slots[0]) in (1, len(x_BND)):
            return read(x_BND, *self.opened_slots)
        return read(x_BND.flatten(0, 1)[:, None], *self.opened_slots).view_as(x_BND)

    # continuations

    def multiply(self, times: int) -> None:
        """Repeat each row `times` times."""
        self.core_state, self.recent_RTD = repeat((self.core_state, self.recent_RTD), times)
        if hasattr(self.memory, "advance"):  # each continuation has its own
            rows_R = torch.arange(self.rows, device=self.text.step_S.device).repeat_interleave(times)
            self.opened, self.own_memory = select_rows(self.opened, rows_R, self.rows), True

    def choose(self, rows_R: Tensor, rows_B: Tensor, parent_BK: Tensor, moved: bool) -> None:
        """Reorder continuations by `rows_R`: texts by `rows_B` (`moved` if that changes any), and of each text the
        continuations `parent_BK`."""
        self.core_state, self.recent_RTD = reorder((self.core_state, self.recent_RTD), rows_R)

        def chosen(t: Any, own: bool) -> Any:
            index, rows = (rows_R, self.rows * self.text.count) if own else (rows_B, self.rows)
            return select_rows(t, index, rows) if own or moved else t

        self.opened = chosen(self.opened, self.own_memory)
        self.opened_slots = chosen(self.opened_slots, self.per_continuation)
        if self.own_memory or moved:
            self.context_keys = None
        self.rows = len(rows_B)
        if moved:
            self.kv_cache.choose(rows_B)
            if self.positions_BSP is not None:
                self.positions_BSP = self.positions_BSP.index_select(0, rows_B)
                self._open_positions()  # an opened scheme holds values per row
            if self.context_visible is not None:
                self.context_visible = self.context_visible.index_select(0, rows_B)
            if self.context_bias is not None:
                self.context_bias = self.context_bias.index_select(0, rows_B)
        if self.context_visible is not None and self.per_continuation:
            slots = self.context_visible.shape[2]
            self.context_visible = self.context_visible.gather(1, parent_BK[..., None].expand(-1, -1, slots))


class StackDecoder:
    """Decode a segment of a stack token by token; memories are written when the segment is full.

    Args:
        stack: in evaluation mode; `why_in_one_piece` must be None.
        state: before the segment, R rows.
        continuations: K; each K neighbouring rows continue one text.
        steps: tokens of the segment to reserve room for.
    """

    def __init__(self, stack: Stack, state: StackState, continuations: int = 1, steps: int = 32) -> None:
        self.stack, self.clock_R, self.read = stack, state.clock_B, 0
        self.text = Continuations(len(state.clock_B) // continuations, state.clock_B.device, continuations)
        self.model_state, self.opened = state.model, None
        self.schemes: list[tuple[Positions, Positions]] = []
        room = steps + stack.model_memory.extra_tokens
        self.layers = [
            LayerDecoder(block.attention, layer_state, self.text, self._open, room)  # type: ignore[arg-type]
            for block, layer_state in zip(stack.blocks, begun(state.layers, state.clock_B), strict=True)
        ]

    def _open(self, scheme: Positions, consecutive: bool) -> Positions:
        """The opened scheme; equal schemes of several layers without parameters share one."""
        shared = next(scheme.parameters(), None) is None
        for earlier, opened in self.schemes if shared else ():
            if alike(earlier, scheme):
                return opened
        self.schemes.append((scheme, scheme.open(consecutive)))
        return self.schemes[-1][1]

    def positions(self, tokens: int) -> Tensor:
        """(R, N, 1): positions of the next tokens."""
        here_R1 = self.clock_R[:, None] + self.read
        return (here_R1 if tokens == 1 else here_R1 + torch.arange(tokens, device=here_R1.device))[..., None]

    def __call__(self, x_RND: Tensor, inputs_RN: Tensor | None = None, places_RN2: Tensor | None = None) -> Tensor:
        """Outputs of the next tokens, (R, N, D): any number of tokens in the first call, then one at a time.

        Args:
            x_RND: embedded tokens. inputs_RN: raw inputs, for model memories that read them.
            places_RN2: further channels of positions, for a model memory that takes them.
        """
        memory, n = self.stack.model_memory, x_RND.shape[1]
        if "context_alone" in memory.needs and n > 1:  # the context of a token depends on the token before
            inputs = [None] * n if inputs_RN is None else inputs_RN.split(1, 1)
            return torch.cat([self(x, i) for x, i in zip(x_RND.split(1, 1), inputs, strict=True)], 1)
        positions_RNP = self.positions(n)
        if places_RN2 is not None:
            positions_RNP = torch.cat([positions_RNP, places_RN2], -1)
        tokens = Tokens(x_RND, positions_RNP, None, inputs_RN, consecutive=True)
        first = self.read == 0
        if first:
            self.opened = open_segment(
                memory, self.model_state, tokens, [block.attention for block in self.stack.blocks]
            )
        entry = memory.enter(self.opened, tokens)
        start, length = entry.segment or (0, n)
        x, positions = entry.tokens.x_BND, entry.tokens.positions_BNP
        options: dict[str, Any] = {}
        if first:
            end = start + length  # tokens of the memory after the segment are seen by no token
            x, positions = x[:, :end], positions[:, :end]
            self.text.grow(end)
            options["visible_NN"] = None if entry.visible_NN is None else entry.visible_NN[:end, :end]
            options["segment"] = None if entry.segment is None else (start, length)
            options["consecutive"] = entry.tokens.consecutive
        else:
            if length != 1:
                raise ValueError(f"{length} tokens within a segment; decode one token at a time")
            x, positions = (t[:, start : start + 1] for t in (x, positions))
            self.text.grow()
            if self.text.count > 1 and "context_alone" not in memory.needs:
                x, positions = (t.view(-1, self.text.count, t.shape[-1]) for t in (x, positions))
        if entry.slots is not self.opened and entry.slots is not getattr(self.opened, "slots", None):
            self._reopen_slots()
        contexts = entry.contexts if entry.contexts is not None else [None] * len(self.layers)
        traces = []
        for block, layer, context in zip(self.stack.blocks, self.layers, contexts, strict=True):
            x, trace = block.step(x, positions, layer, slots=entry.slots, context=context, **options)  # type: ignore[operator]
            traces.append(trace)
        if first:
            x = x[:, start:]
            traces = [t if entry.segment is None else t.narrow(start, length) for t in traces]
        if len(x) != len(x_RND):
            x, traces = x.view_as(x_RND), [_trace_by_row(trace) for trace in traces]
        opened = advance(memory, self.opened, x, traces)
        if opened is not self.opened:
            self._reopen_slots()
        self.opened = opened
        self.read += n
        return self.stack.norm(x).view(len(x_RND), n, -1)  # type: ignore[no-any-return]

    def _reopen_slots(self) -> None:
        for layer in self.layers:
            layer.opened_slots = None

    def multiply(self, times: int) -> None:
        """Repeat each row `times` times."""
        index = torch.arange(len(self.clock_R), device=self.clock_R.device).repeat_interleave(times)
        self.clock_R, self.opened = self.clock_R[index], select_rows(self.opened, index, len(self.clock_R))
        self.text.multiply(times)
        for layer in self.layers:
            layer.multiply(times)

    def choose(self, rows_R: Tensor) -> None:
        """Reorder rows; a row may repeat among the continuations of its text, and whole texts may be dropped."""
        k = self.text.count
        rows_BK = rows_R.view(-1, k)
        rows_B, parent_BK = rows_BK[:, 0] // k, rows_BK % k
        moved = self.text.choose(rows_B, parent_BK)
        self.clock_R, self.opened = self.clock_R[rows_R], select_rows(self.opened, rows_R, len(self.clock_R))
        for layer in self.layers:
            layer.choose(rows_R, rows_B, parent_BK, moved)


def _context_keys(memory: LayerMemory, reading: Reading) -> list[Tensor | None]:
    readings = reading.carry if isinstance(memory, SideBySide) else [reading]
    return [None if r.context is None else r.context.k_BHME for r in readings]


def _trace_by_row(trace: Trace) -> Trace:
    """The trace of (B, K) tokens as a trace of R rows of one token."""
    x_RND, y_RND = (t.flatten(0, 1)[:, None] for t in trace[:2])
    assert trace.query.positions_BNP is not None
    return Trace(x_RND, y_RND, Query(x_RND, positions_BNP=trace.query.positions_BNP.flatten(0, 1)[:, None]), Reading())


def why_in_one_piece(stack: Stack) -> str | None:
    """Say why the stack must read whole segments and cannot decode token by token; None if it can."""
    if stack.reversible:
        return "a reversible stack reads whole segments"
    inside: list[Any] = [m for b in stack.blocks for m in (b, b.attention, b.attention.core)]  # type: ignore[union-attr]
    watched = next(filter(is_watched, (stack, *inside)), None)
    if watched is not None:
        return passed_by(watched)
    memory = stack.model_memory
    if (why := needs_whole_segments(memory)) is not None:
        return why
    for block in stack.blocks:
        if not isinstance(block, Block):
            return f"a {type(block).__name__} reads whole segments"
        layer = block.attention
        for member in members_of(layer.memory):
            if (why := needs_whole_segments(member)) is not None:
                return why
            if stands_in_front(member):
                return f"memory {type(member).__name__} reads a whole segment before queries and keys"
            if hasattr(member, "advance") and member is not layer.memory:
                return f"memory {type(member).__name__} changes with each token, beside others"
        if layer.core.steps_from is None:
            return f"{layer.core.title} has no form for single tokens"
        if not layer.causal or layer.reduction is not None:
            return "a layer whose tokens see later tokens reads whole segments"
    return None


def passed_by(module: nn.Module) -> str:
    """Say why a module with hooks must be called with whole segments."""
    return f"a {type(module).__name__} has hooks or a replaced forward, which single tokens would bypass"


def is_watched(module: nn.Module) -> bool:
    """Return whether code observes the calls of a module, as FSDP, accelerate and profilers do by hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
