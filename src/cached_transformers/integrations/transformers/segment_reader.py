"""The forward of a decoder with a memory: what it is called with is read in segments, and the state carried.

Within a segment the memory is as the past has left it; it is written when the segment ends: behind `segment_length`
tokens, which a longer text is cut into, and at the end of a call. With `past_key_values` the next call goes on in the
open segment instead. Keys, values and positions begin anew with each segment.

Legend: B rows, N tokens, L tokens with those of the memory round them, M memory tokens, D width.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers.checks import insist
from cached_transformers.memories.rmt import RMT
from cached_transformers.seam.memory import Query, Reading, Tokens, Trace
from cached_transformers.state import State, seal
from cached_transformers.state import check as check_state

from .memory_calls import Carried, signature_with_state
from .segment_cache import DynamicCache, MemoryCache, MemoryState
from .stream_tap import Passage, StreamTap


class SegmentReader:
    """Stands in the place of a decoder's forward: cuts what it is called with into segments and carries the state.

    Args:
        decoder: the module that embeds tokens and has the layers.
        taps: of the layers that have a memory. around: the memory that puts tokens round each segment.
        segment_length: tokens in a segment; None for one segment a call.
    """

    def __init__(
        self,
        decoder: nn.Module,
        taps: list[StreamTap],
        around: RMT | None,
        segment_length: int | None,
    ) -> None:
        self.decoder: Any = decoder
        self.taps, self.around, self.segment_length = taps, around, segment_length
        self.names = [name for name in inspect.signature(type(decoder).forward).parameters if name != "self"]

    @property
    def __signature__(self) -> inspect.Signature:
        return signature_with_state(self.decoder)

    def init_state(self, rows: int) -> MemoryState:
        """State of rows that have read nothing.

        Raises:
            ValueError: less than one row.
        """
        if rows < 1:
            raise ValueError(f"rows={rows} must be at least 1")
        like = next(self.decoder.parameters())
        model = () if self.around is None else self.around.init_state(rows, like)
        return seal(MemoryState(model, tuple(tap.memory.init_state(rows, like) for tap in self.taps)))  # type: ignore[no-any-return]

    def __call__(self, *args: Any, memory_state: State | None = None, **kwargs: Any) -> Any:
        """The decoder's forward over all segments; its output holds `memory_state` as well.

        Raises:
            ValueError: arguments that a memory cannot follow, or a state of another model or number of rows.
        """
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        given = {name: value for name, value in given.items() if value is not None}
        carried = memory_state if isinstance(memory_state, Carried) else Carried(memory_state)
        names = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids")
        new = {name: given.pop(name) for name in names if name in given}
        self._check(new, given)
        first = new.get("input_ids", new.get("inputs_embeds"))
        assert first is not None
        rows, n = first.shape[:2]
        new = {name: t.expand(rows, *t.shape[1:]) for name, t in new.items()}
        text = self._text(given.pop("past_key_values", None), carried.state, rows)
        mask = given.pop("attention_mask", None)
        padding_BN = self._padding(mask, text, rows, n)
        tuples = given.pop("return_dict", None) is False
        keeps = self._keeps(given.pop("use_cache", None))
        outs, done = [], 0
        begin = text.tokens - text.length  # the column at which the padding begins
        while done < n:
            room = n if self.segment_length is None else self.segment_length - text.length
            size = min(room, n - done)
            columns = slice(text.tokens - text.length - begin, text.tokens + size - begin)
            piece = {name: t[:, done : done + size] for name, t in new.items()}
            if "position_ids" in piece:
                before = text.tokens - text.length
                piece["position_ids"] = (piece["position_ids"] - before).clamp(min=0)
            outs.append(self._piece(text, piece, None if padding_BN is None else padding_BN[:, columns], keeps, given))
            done += size
        out = _joined(outs)
        if keeps:
            out["past_key_values"] = text
        if text.after is not None:
            carried.after = out["memory_state"] = text.after
        return out.to_tuple() if tuples else out

    def _check(self, new: dict[str, Tensor], given: dict[str, Any]) -> None:
        if ("input_ids" in new) == ("inputs_embeds" in new):
            raise ValueError("give either input_ids or inputs_embeds")
        if given.get("output_attentions", getattr(self.decoder.config, "output_attentions", False)):
            raise ValueError(
                "output_attentions=True: the weights of a segment would not say what its tokens read from the memory; "
                "leave it out, or call remove_memory(model) first"
            )
        if "encoder_hidden_states" in given:
            raise ValueError("encoder_hidden_states: a decoder with a memory attends no encoder; leave them out")
        if self.around is not None and "token_type_ids" in new:
            raise ValueError("token_type_ids: memory tokens have no type; leave them out, or take 'grc_stream'")

    def _keeps(self, use_cache: bool | None) -> bool:
        """Whether keys and values are kept. In training transformers' default would keep them for nobody."""
        checkpointed = self.decoder.training and getattr(self.decoder, "gradient_checkpointing", False)
        if use_cache is None:
            use_cache = bool(getattr(self.decoder.config, "use_cache", False)) and not self.decoder.training
        return bool(use_cache) and not checkpointed

    def _text(self, cache: Any, state: State | None, rows: int) -> MemoryCache:
        if isinstance(cache, MemoryCache) and cache.tokens:
            if state is not None and not cache.began_with(state):
                raise ValueError(
                    "past_key_values hold a segment that was begun with another memory_state; give the state alone to "
                    "begin a new segment, or past_key_values alone to go on"
                )
            found = next(iter(cache.open.values())).shape[0] if cache.open else rows
            if found != rows:
                raise ValueError(f"past_key_values hold {found} rows, the call {rows}; rows keep their place")
            return cache
        if cache is not None and not isinstance(cache, MemoryCache):
            if type(cache) is not DynamicCache or cache.offloading:
                raise ValueError(
                    f"past_key_values of type {type(cache).__name__}: keys and values of a segment are kept in a "
                    "DynamicCache, which a memory can begin anew; leave cache_implementation at its default"
                )
            if cache.get_seq_length():
                raise ValueError(
                    "past_key_values were not made by this model with its memory; pass those of its last output, or "
                    "none"
                )
        if state is not None and not torch.compiler.is_compiling():
            check_state(state, self.init_state(1), rows)
        return MemoryCache(state, self.init_state(rows) if state is None else state, self.state_after)

    def _padding(self, mask: Any, text: MemoryCache, rows: int, n: int) -> Tensor | None:
        """(B, columns of the open segment and the call), True = padding; None where there is none."""
        if mask is None:
            before = text.padding_BN
            return None if before is None else torch.cat([before, before.new_zeros(rows, n)], 1)
        total = text.tokens + n
        if not isinstance(mask, Tensor) or mask.shape != (rows, total):
            found = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"type {type(mask).__name__}"
            raise ValueError(
                f"an attention mask of {found}: beside a memory it marks padding alone, 0 for padding, as "
                f"(rows, tokens) = {(rows, total)}, those of past_key_values included"
            )
        padding_BN = mask == 0
        if self.segment_length is not None and total > self.segment_length:
            why = (
                f"padding in front of tokens would shift where a row's segments of {self.segment_length} tokens begin; "
                "pad on the right, or read texts of one length at a time (generate: prompts of one length)"
            )
            insist(~(padding_BN[:, :-1] & ~padding_BN[:, 1:]).any(), why)
        return padding_BN[:, text.tokens - text.length :]

    def _piece(
        self,
        text: MemoryCache,
        new: dict[str, Tensor],
        padding_BN: Tensor | None,
        keeps: bool,
        options: dict[str, Any],
    ) -> Any:
        """The host's output for a part of one segment."""
        fresh = text.length == 0
        text.take(new, padding_BN)
        size = next(iter(new.values())).shape[1]
        closes = text.length == self.segment_length
        if not fresh and not closes and text.inner is not None:
            text.after = None  # whoever asks for it pays for it
            return self._go_on(text, new, options)
        # A segment that is full is read again as a whole, whatever keys and values there are: it has to be written.
        out, state, text.inner = self._segment(text, keeps and not closes, options)
        text.after = state
        if closes:
            text.close(state)
        return out if fresh else _narrowed(out, out.last_hidden_state.shape[1] - size, size)

    def _go_on(self, text: MemoryCache, new: dict[str, Tensor], options: dict[str, Any]) -> Any:
        """Tokens behind those whose keys and values are kept; nothing is written."""
        front = 0 if self.around is None else self.around.length
        passage = Passage(text.state.layers, None, writes=False)
        mask = None
        if text.padding_BN is not None:
            mask = (~text.padding_BN).long()
            mask = torch.cat([mask.new_ones(len(mask), front), mask], 1)
        if front:
            new = self._embedded(new)
            if "position_ids" in new:
                new["position_ids"] = new["position_ids"] + front
        return self._host(new, mask, text.inner, passage, options)

    def state_after(self, text: MemoryCache) -> State:
        """State after the open segment, which is read once more."""
        return self._segment(text, False, {})[1]

    def _segment(
        self, text: MemoryCache, keeps: bool, options: dict[str, Any]
    ) -> tuple[Any, MemoryState, DynamicCache | None]:
        """A segment from its first token on: the host's output, the state after it, keys and values if kept."""
        inner = DynamicCache(config=self.decoder.config) if keeps else None
        state, padding_BN = text.state, text.padding_BN
        if self.around is not None:
            out, model_state = self._surrounded(text, inner, options)
            return out, seal(MemoryState(model_state, state.layers)), inner
        passage = Passage(state.layers, padding_BN, writes=True)
        mask = None if padding_BN is None else (~padding_BN).long()
        out = self._host(text.open, mask, inner, passage, options)
        return out, seal(MemoryState((), tuple(passage.after))), inner

    def _surrounded(self, text: MemoryCache, inner: DynamicCache | None, options: dict[str, Any]) -> tuple[Any, State]:
        memory = self.around
        assert memory is not None
        new = self._embedded(text.open)
        x_BND = new["inputs_embeds"]
        n, given = x_BND.shape[1], new.get("position_ids")
        places_BN = torch.arange(n, device=x_BND.device).expand(x_BND.shape[:2]) if given is None else given
        entry = memory.enter(text.state.model, Tokens(x_BND, places_BN[..., None], text.padding_BN))
        tokens = entry.tokens
        call = {"inputs_embeds": tokens.x_BND}
        if given is not None or text.padding_BN is not None:  # the tokens in front take the host's first places
            call["position_ids"] = (tokens.positions_BNP[..., 0] + memory.length).clamp(min=0)
        mask = None if tokens.padding_BN is None else (~tokens.padding_BN).long()
        if entry.visible_NN is not None:
            visible_BLL = entry.visible_NN.expand(len(x_BND), -1, -1)
            if tokens.padding_BN is not None:
                itself_LL = torch.eye(visible_BLL.shape[1], dtype=torch.bool, device=x_BND.device)
                visible_BLL = visible_BLL & (~tokens.padding_BN[:, None] | itself_LL)
            lowest = torch.finfo(x_BND.dtype).min
            mask = torch.zeros_like(visible_BLL, dtype=x_BND.dtype).masked_fill(~visible_BLL, lowest)[:, None]
        out = self._host(call, mask, inner, None, options)
        query = Query(x_BND, padding_BN=text.padding_BN)
        trace = Trace(x_BND, x_BND, query, Reading())
        model_state = memory.exit(text.state.model, out.last_hidden_state, [trace])[1]
        if inner is not None and memory.behind:
            inner.crop(-memory.behind)
        return _narrowed(out, memory.length, n), model_state

    def _embedded(self, new: dict[str, Tensor]) -> dict[str, Tensor]:
        if "inputs_embeds" in new:
            return dict(new)
        embedding = self.decoder.get_input_embeddings()
        return {"inputs_embeds": embedding(new["input_ids"])} | {k: t for k, t in new.items() if k != "input_ids"}

    def _host(
        self,
        new: dict[str, Tensor],
        mask: Tensor | None,
        inner: DynamicCache | None,
        passage: Passage | None,
        options: dict[str, Any],
    ) -> Any:
        """The decoder's own forward."""
        extra = {} if passage is None else {"memory_passage": passage}
        return type(self.decoder).forward(
            self.decoder,
            **new,
            attention_mask=mask,
            past_key_values=inner,
            use_cache=inner is not None,
            return_dict=True,
            **extra,
            **options,
        )


def _narrowed(out: Any, start: int, length: int) -> Any:
    """The output for some neighbouring tokens."""
    out["last_hidden_state"] = out.last_hidden_state.narrow(1, start, length)
    if out.get("hidden_states") is not None:
        out["hidden_states"] = tuple(t.narrow(1, start, length) for t in out.hidden_states)
    return out


def _joined(outs: list[Any]) -> Any:
    """One output for pieces that follow each other."""
    out = outs[-1]
    if len(outs) > 1:
        out["last_hidden_state"] = torch.cat([part.last_hidden_state for part in outs], 1)
        if out.get("hidden_states") is not None:
            out["hidden_states"] = tuple(
                torch.cat(parts, 1) for parts in zip(*(p.hidden_states for p in outs), strict=True)
            )
    return out
