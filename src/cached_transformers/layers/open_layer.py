"""An attention layer within an open segment: keys and values stay, what is read of the memory is prepared once, and a
token costs one token.

The first tokens go through the layer as those of any segment do, which leave here what the later ones need: the opened
memory, keys with their positions (those of the context first), or the core's state. Later tokens come one at a time, of
each of K continuations of a row; they stand side by side as (B, K, D), and a mask says which slots each of them sees.

Cost of a token, in multiply-adds: 4 D^2 (projections) + 2 (M + S) D (attention over M slots of the context and S
tokens of the segment), and what the memory's `read` costs for one token.

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
from cached_transformers.interfaces.incremental import open_segment
from cached_transformers.interfaces.memory import Context, LayerMemory, Offer, Query, Reading
from cached_transformers.linear_maps import plain_weights
from cached_transformers.memories.parts.composite import SideBySide
from cached_transformers.positions import Positions
from cached_transformers.state import State, reorder, repeat

from .attention import Attended, SelfAttention
from .context_attention import ContextAttention
from .decoder_block import KeysValues
from .kv_cache import Continuations, KeptKeys, own_slots
from .short_convolution import ShiftedState, ShortConvolution


class OpenLayer:
    """What a layer keeps while a segment grows.

    Args:
        attention: the layer, in evaluation mode.
        state: of its memory and core, of R rows.
        text: who sees which of the text's slots.
        open_positions: opens its scheme, of which it says whether all keys stand in one run.
        steps: tokens for which there is to be room.
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
        self.recent_RTD: State = ()
        """What a short convolution needs of the tokens before."""
        if isinstance(state, ShiftedState):
            self.recent_RTD, state = state
        self.state, self.shifted = state, False
        self.positions, self.open_positions = attention.positions, open_positions
        self.patterned = type(attention.core).sees is not Attention.sees
        self.memory: LayerMemory = attention.memory
        self.reader = self.memory
        """What later tokens read; one that remembers nothing where there is nothing to read in any row."""
        self.begun, self.opened, self.core_state = False, None, ()
        self.kept = KeptKeys(steps)
        self.context: Context | None = None
        self.offer: Offer | None = None
        self.context_visible: Tensor | None = None
        self.before = 0
        """Slots of the context, which stand before those of the text."""
        self.positions_BSP: Tensor | None = None
        """Of all slots, where somebody asks for them."""
        self.keys_read: list[Tensor | None] | None = None
        """Of the contexts that were read, by which these are known; None after rows have moved."""
        self.opened_slots: Any = None
        """Of a model memory; None where they are to be made anew."""
        self.rows = text.rows
        self.each = text.count > 1
        """Whether what was opened is of each continuation, and not one for all of a row."""

    def __call__(self, x_BND: Tensor, positions_BNP: Tensor, *, context: Offer | None = None, **first: Any) -> Attended:
        """What is added to the next tokens.

        Args:
            x_BND: the segment's first tokens, (R, N, D); after these the next token of each continuation, (B, K, D).
            positions_BNP: of the tokens.
            context: from a model memory; the same one during the segment.
            first: what `SelfAttention.forward` takes beside, for the first tokens.

        Raises:
            ValueError: the context is another one than before.
        """
        if isinstance(self.attention, ContextAttention):  # keeps nothing of the text, and has a new context each time
            return self.attention(x_BND, positions_BNP, state=self.state, context=context)  # type: ignore[no-any-return]
        if self.begun:
            return self._next(x_BND, positions_BNP, context)
        self.begun, self.offer = True, context
        self.first_BNP = positions_BNP
        return self.attention(x_BND, positions_BNP, state=self.state, context=context, keep=self, **first)  # type: ignore[no-any-return]

    def shift(self, convolution: ShortConvolution, x: Tensor, segment: tuple[int, int] | None) -> Tensor:
        """The next tokens with those before them, in the shape in which they come: (R, N, D) first, then (B, K, D)."""
        assert isinstance(self.recent_RTD, Tensor)
        x_RND = x.reshape(len(self.recent_RTD), -1, x.shape[-1]) if self.shifted else x
        y_RND, self.recent_RTD = convolution(x_RND, self.recent_RTD, segment=None if self.shifted else segment)
        self.shifted = True
        return y_RND.view_as(x)

    # what the layer calls for the first tokens

    def open(self, state: State, query: Query) -> Reading:
        assert query.positions_BNP is not None
        self.opened = open_segment(self.memory, state, query.positions_BNP[:, :1], self.attention.project_kv)
        reading = self.memory.read(self.opened, query, self.attention.project_kv)
        self.keys_read = _keys_of(self.memory, reading)
        if reading.context is None and reading.any_B is not None and not bool(reading.any_B.any()):
            self.reader = LayerMemory()
        return reading

    def take(self, k_BHNE: Tensor, v_BHNE: Tensor, context: Context | None, core_state: State) -> None:
        if context is not None and context.gather is not None:
            raise ValueError(f"memory {type(self.memory).__name__} gathers wide values, which no token can read alone")
        if context is not None and not bool(context.valid_BM.any()):
            context = None  # nothing is there to be attended until the segment ends
        self.context = context
        self._open_positions()
        asks = type(self.positions).bias is not Positions.bias or self.memory.window() is not None
        if self.attention.core.steps_from == "state":
            self.core_state = core_state
            return
        k, b = self.text.count, k_BHNE.shape[0] // self.text.count
        positions_BSP = self.first_BNP.reshape(b, -1, self.first_BNP.shape[-1])
        if context is not None:
            before = (t.expand(b * k, *t.shape[1:]) for t in context[:4])
            keys, values, places_BMP, valid_BM = before
            self.kept.extend(KeysValues(_side_by_side(keys, k), _side_by_side(values, k)), k)
            valid = valid_BM.view(b, 1, -1)
            if k > 1 or not bool(valid_BM.all()):
                self.context_visible = valid & own_slots(k, valid_BM.shape[1], valid.device)
            places = places_BMP.reshape(b, -1, places_BMP.shape[-1])
            positions_BSP = torch.cat([places, positions_BSP], 1)
            self.before = places.shape[1]
        self.positions_BSP = positions_BSP if asks else None
        self.kept.extend(KeysValues(_side_by_side(k_BHNE, k), _side_by_side(v_BHNE, k)), k)

    def _open_positions(self) -> None:
        run = self.context is None or self.context.consecutive
        self.positions = self.open_positions(self.attention.positions, run)

    # the tokens that follow

    def _next(self, x_BKD: Tensor, positions_BKP: Tensor, offer: Offer | None) -> Attended:
        layer, core = self.attention, self.attention.core
        h_BKD = layer.norm(x_BKD)
        q, k, v = layer._split(layer.qkv(h_BKD))
        if layer.query_factor != 1:
            q = q * layer.query_factor
        query = Query(h_BKD, q, positions_BKP, None, None, k, v)
        reading, asked = self._read(query)
        keys = _keys_of(self.reader, reading)
        self.keys_read = keys if self.keys_read is None else self.keys_read
        if offer is not self.offer or any(a is not b for a, b in zip(keys, self.keys_read, strict=True)):
            raise ValueError(
                f"layer memory {type(self.memory).__name__}, or a model memory round it, gives another context in the "
                "middle of a segment; a memory that writes open() makes its context there, once"
            )
        placed_q, placed_k = self.positions.query(q, positions_BKP), self.positions.rotate(k, positions_BKP)
        if core.steps_from == "state":
            y_BHKE, self.core_state = self._scan(placed_q, placed_k, v, h_BKD)
        else:
            y_BHKE, lse_BHK = self._attend(q, placed_q, KeysValues(placed_k, v), positions_BKP, reading.context)
            if lse_BHK is not None:
                reading = reading._replace(lse_BHN=lse_BHK if asked is query else _as_rows(lse_BHK[..., None])[..., 0])
        rows = asked is not query
        y = _as_rows(y_BHKE) if rows else y_BHKE
        y_BKD = self.reader.project(y, asked, reading, layer.output, plain_weights(layer.output))
        return Attended(y_BKD.view_as(x_BKD) if rows else y_BKD, query, reading, None)

    def _read(self, query: Query) -> tuple[Reading, Query]:
        """What the tokens read, and the query of one token a row where each continuation has a memory of its own."""
        asked = query
        if self.each:
            parts = (_as_rows(t) for t in (query.q_BHNE, query.k_BHNE, query.v_BHNE) if t is not None)
            q, k, v = parts
            assert query.positions_BNP is not None
            x, places = (t.flatten(0, 1)[:, None] for t in (query.x_BND, query.positions_BNP))
            asked = Query(x, q, places, None, None, k, v)
        return self.reader.read(self.opened, asked, self.attention.project_kv), asked

    def _scan(self, q: Tensor, k: Tensor, v: Tensor, h_BKD: Tensor) -> tuple[Tensor, State]:
        q, k, v = (_as_rows(t) for t in (q, k, v))
        out, state = self.attention.core.scan(q, k, v, self.core_state, x_BND=h_BKD.flatten(0, 1)[:, None])
        return out.unflatten(0, h_BKD.shape[:2])[:, :, :, 0].transpose(1, 2), state

    def _attend(
        self, q: Tensor, placed_q: Tensor, new: KeysValues, positions_BKP: Tensor, read: Context | None
    ) -> tuple[Tensor, Tensor | None]:
        k, v = self.kept.extend(new)
        bias = None
        if self.positions_BSP is not None:
            self.positions_BSP = torch.cat([self.positions_BSP, positions_BKP], 1)
            run = self.text.count == 1 and (self.context is None or self.context.consecutive)
            bias = self.positions.bias(q, positions_BKP, self.positions_BSP, causal_run=run)
        mask = self._visible(positions_BKP)
        shares = self._shares(read, k.shape[2])
        if shares is not None:
            bias = shares if bias is None else bias + shares
        if bias is not None:
            bias = bias.to(q.dtype)
            mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
        lse = log_sum_exp(placed_q, k, mask) if "lse" in self.reader.needs else None
        return F.scaled_dot_product_attention(placed_q, k, v, attn_mask=mask), lse

    def _visible(self, positions_BKP: Tensor) -> Tensor | None:
        """(B or 1, H or 1, K, S): the slots that each continuation sees; None for all."""
        text, before, mask = self.text, self.before, None
        if self.context_visible is not None:
            mask = torch.cat([self.context_visible.expand(-1, text.count, -1), text.visible_BKS], 2)[:, None]
        elif text.count > 1:
            mask = F.pad(text.visible_BKS, (before, 0), value=True)[:, None]
        near_HS = self.attention.core.sees(text.step - 1, text.step_S) if self.patterned else None
        if near_HS is not None:
            near = F.pad(near_HS.view(1, -1, 1, near_HS.shape[-1]), (before, 0), value=True)
            mask = near if mask is None else mask & near
        window = self.memory.window()
        if window is not None:
            assert self.positions_BSP is not None
            close = (positions_BKP[..., :1] - self.positions_BSP[:, None, :, 0] < window)[:, None]
            mask = close if mask is None else mask & close
        return mask

    def _shares(self, read: Context | None, slots: int) -> Tensor | None:
        """(B or 1, 1, K, S): what is added to logits where the next tokens see a share of slots; None for nothing."""
        if self.context is None or read is None or read.visible_BHNM is None:
            return None
        logits_BHKM, count = logits_of(read.visible_BHNM), self.text.count
        if self.each:  # its own slots are seen alone, wherever they stand
            logits_BHKM = logits_BHKM.view(-1, 1, count, logits_BHKM.shape[-1])
        own = self.before // (count if self.each else 1)
        logits_BHKM = F.pad(logits_BHKM, (0, own - logits_BHKM.shape[-1]))  # those of a model memory stand behind
        if self.each:
            logits_BHKM = logits_BHKM.repeat(1, 1, 1, count)
        return F.pad(logits_BHKM, (0, slots - self.before))

    def look(self, slot_attention: nn.Module, slots: tuple[Any, ...], x_BND: Tensor) -> Tensor:
        """What the tokens read from the slots of a model memory, whose keys and values are made once."""
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
        """Each row `times` times."""
        self.core_state, self.recent_RTD = repeat((self.core_state, self.recent_RTD), times)

    def choose(self, rows_R: Tensor, rows_B: Tensor, parent_BK: Tensor, moved: bool) -> None:
        """Continuations in the order `rows_R`: rows in that of `rows_B`, which `moved` says whether they have left, and
        of each the continuations `parent_BK`."""
        self.core_state, self.recent_RTD = reorder((self.core_state, self.recent_RTD), rows_R)
        if self.each or moved:
            index, rows = (rows_R, self.rows * self.text.count) if self.each else (rows_B, self.rows)
            self.opened, self.opened_slots = (rows_of(t, index, rows) for t in (self.opened, self.opened_slots))
            self.keys_read = None
        self.rows = len(rows_B)
        if moved:
            self.kept.choose(rows_B)
            if self.positions_BSP is not None:
                self.positions_BSP = self.positions_BSP.index_select(0, rows_B)
                self._open_positions()  # what is kept is of other rows
            if self.context_visible is not None:
                self.context_visible = self.context_visible.index_select(0, rows_B)
        if self.context_visible is not None and self.each:
            slots = self.context_visible.shape[2]
            self.context_visible = self.context_visible.gather(1, parent_BK[..., None].expand(-1, -1, slots))


def rows_of(opened: Any, index: Tensor, rows: int) -> Any:
    """What a memory opened, with its rows in the order of `index`: those of tensors whose first dimension they are."""
    if isinstance(opened, Tensor):
        return opened.index_select(0, index) if opened.dim() and opened.shape[0] == rows else opened
    if isinstance(opened, tuple):
        parts = [rows_of(part, index, rows) for part in opened]
        return type(opened)(*parts) if hasattr(opened, "_fields") else tuple(parts)
    return opened


def _keys_of(memory: LayerMemory, reading: Reading) -> list[Tensor | None]:
    """Keys of the contexts that a layer's memories gave."""
    readings = reading.carry if isinstance(memory, SideBySide) else [reading]
    return [None if r.context is None else r.context.k_BHME for r in readings]


def _as_rows(t_BHKE: Tensor) -> Tensor:
    """(B, H, K, E) to (B K, H, 1, E)."""
    return t_BHKE.transpose(1, 2).flatten(0, 1)[:, :, None]


def _side_by_side(t_RHNE: Tensor, continuations: int) -> Tensor:
    """(B K, H, N, E) to (B, H, K N, E)."""
    if continuations == 1:
        return t_RHNE
    return t_RHNE.unflatten(0, (-1, continuations)).transpose(1, 2).flatten(2, 3)
