"""The forward of a decoder with a memory: what it is called with is read in segments, and the state carried.

Within a segment the memory is as the past has left it; it is written when the segment ends: behind `segment_length`
tokens, which a longer text is cut into, and at the end of a call. With `past_key_values` the next call goes on in the
open segment instead. Keys, values and positions begin anew with each segment.

Legend: B rows, N tokens, L tokens that they may see, D width, P position channels.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cached_transformers.checks import insist
from cached_transformers.integrations.taps import no_loss
from cached_transformers.models.segments import cut, read_segments
from cached_transformers.seam.memory import ModelMemory, Tokens
from cached_transformers.state import State, seal
from cached_transformers.state import check as check_state

from .handed import Handed
from .output_state import Carried, with_state
from .segment_cache import DynamicCache, MemoryCache, MemoryState
from .stream_tap import Passage, StreamTap
from .through_host import HostThrough, call_for, joined, narrowed, place_of_segment


class Piece(NamedTuple):
    """The host's output for a part of one segment, and the text as it is behind that part."""

    out: Any
    state: MemoryCache


class SegmentReader:
    """Cuts what a decoder is called with into segments and carries the state; `read` is what its forward becomes.

    Args:
        decoder: the module that embeds tokens and has the layers.
        taps: of the layers that have a memory. memory: the one that spans the layers, or None.
        segment_length: tokens in a segment; None for one segment a call.
    """

    def __init__(
        self, decoder: nn.Module, taps: list[StreamTap], memory: ModelMemory | None, segment_length: int | None
    ) -> None:
        self.decoder: Any = decoder
        self.taps, self.memory, self.segment_length = taps, memory, segment_length
        self.handed: Carried | None = None
        self.names = [name for name in inspect.signature(type(decoder).forward).parameters if name != "self"]

    def init_state(self, rows: int) -> MemoryState:
        """State of rows that have read nothing.

        Raises:
            ValueError: less than one row.
        """
        if rows < 1:
            raise ValueError(f"rows={rows} must be at least 1")
        like = next(self.decoder.parameters())
        model = () if self.memory is None else self.memory.init_state(rows, like)
        return seal(MemoryState(model, tuple(tap.memory.init_state(rows, like) for tap in self.taps)))  # type: ignore[no-any-return]

    def read(self, *args: Any, memory_state: State | None = None, **kwargs: Any) -> Any:
        """The decoder's forward over all segments; its output holds `memory_state` as well.

        Raises:
            ValueError: arguments that a memory cannot follow, or a state of another model or number of rows.
        """
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        given = {name: value for name, value in given.items() if value is not None}
        carried = memory_state if isinstance(memory_state, Carried) else self.handed or Carried(memory_state)
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
        begin = text.tokens - text.length  # the column at which the padding begins

        def read_piece(columns: slice, text: MemoryCache, reset_B: Tensor | None) -> Piece:
            before = text.tokens - text.length
            piece = {name: t[:, columns] for name, t in new.items()}
            if "position_ids" in piece:
                piece["position_ids"] = (piece["position_ids"] - before).clamp(min=0)
            end = text.tokens + columns.stop - columns.start
            hidden_BN = None if padding_BN is None else padding_BN[:, before - begin : end - begin]
            return Piece(self._piece(text, piece, hidden_BN, keeps, given), text)

        pieces = cut(n, self.segment_length, text.length)
        out = joined([piece.out for piece in read_segments(read_piece, pieces, text)])
        if keeps:
            out["past_key_values"] = text
        if text.after is not None:
            carried.after = text.after
            out = with_state(out, text.after)
        return out.to_tuple() if tuples else out

    def _check(self, new: dict[str, Tensor], given: dict[str, Any]) -> None:
        if ("input_ids" in new) == ("inputs_embeds" in new):
            raise ValueError("give either input_ids or inputs_embeds")
        if given.get("output_attentions", getattr(self.decoder.config, "output_attentions", False)):
            raise ValueError(
                "output_attentions=True: the weights of a segment would not say what its tokens read from the memory; "
                "leave it out, or call remove_memory(model) first"
            )
        if given.get("output_router_logits", getattr(self.decoder.config, "output_router_logits", False)):
            raise ValueError(
                "output_router_logits=True: the loss that balances the experts takes its tokens for one text; beside a "
                "memory, which reads segments, leave it out and set config.output_router_logits=False"
            )
        if "encoder_hidden_states" in given:
            raise ValueError("encoder_hidden_states: a decoder with a memory attends no encoder; leave them out")
        if self.memory is not None and "token_type_ids" in new:
            raise ValueError(
                "token_type_ids: tokens of a memory have no type; leave them out, or take a memory that stands in the "
                "layers"
            )

    def _keeps(self, use_cache: bool | None) -> bool:
        """Whether keys and values are kept. In training transformers' default would keep them for nobody."""
        modules = self.decoder.modules()
        checkpointed = self.decoder.training and any(getattr(m, "gradient_checkpointing", False) for m in modules)
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
        if not fresh and not closes and text.host_cache is not None:
            text.after = None  # whoever asks for it pays for it
            return self._go_on(text, new, options)
        # A segment that is full is read again as a whole, whatever keys and values there are: it has to be written.
        out, state, text.host_cache = self._segment(text, keeps and not closes, options)
        text.after = state
        if closes:
            text.close(state)
        return out if fresh else narrowed(out, out.last_hidden_state.shape[1] - size, size)

    def _go_on(self, text: MemoryCache, new: dict[str, Tensor], options: dict[str, Any]) -> Any:
        """Tokens behind those whose keys and values are kept; nothing is written."""
        layers = Passage(text.state.layers, writes=False)
        if self.memory is None:
            mask = None if text.padding_BN is None else (~text.padding_BN).long()
            return self.host(new, mask, text.host_cache, layers, options)
        entry = self.memory.enter(text.state.model, self._tokens(text))
        behind = place_of_segment(entry, text.length, self.memory)[1] + text.length
        size = next(iter(new.values())).shape[1]
        return self.host(*call_for(entry, behind - size, behind), text.host_cache, layers, options)

    def state_after(self, text: MemoryCache) -> State:
        """State after the open segment, which is read once more."""
        return self._segment(text, False, {})[1]

    def _segment(
        self, text: MemoryCache, keeps: bool, options: dict[str, Any]
    ) -> tuple[Any, MemoryState, DynamicCache | None]:
        """A segment from its first token on: the host's output, the state after it, keys and values if kept."""
        if self.memory is not None:
            return self._led(text, keeps, options)
        host_cache = DynamicCache(config=self.decoder.config) if keeps else None
        layers = Passage(text.state.layers, text.padding_BN)
        mask = None if text.padding_BN is None else (~text.padding_BN).long()
        out = self.host(text.open, mask, host_cache, layers, options)
        return out, seal(MemoryState((), tuple(layers.after))), host_cache

    def _led(
        self, text: MemoryCache, keeps: bool, options: dict[str, Any]
    ) -> tuple[Any, MemoryState, DynamicCache | None]:
        """As `_segment`, where a memory leads the segment through the layers."""
        memory = self.memory
        assert memory is not None
        # Who goes through the layers in another way leaves keys and values of which nobody knows what they are.
        keeps = keeps and type(memory).run is ModelMemory.run
        # Of the config's kind, layers with a sliding window would drop keys, and could not give back those of the
        # memory's tokens behind the segment; the window is in the mask, too.
        host_cache = DynamicCache() if keeps else None
        through = HostThrough(self.host, text.state.layers, host_cache, options)
        steps, model_state, loss = memory.run(text.state.model, self._tokens(text), through)
        no_loss(loss, memory)
        out = joined(through.outs)
        out["last_hidden_state"] = torch.cat(steps, 1)
        return out, seal(MemoryState(model_state, through.states)), host_cache

    def _tokens(self, text: MemoryCache) -> Tokens:
        """The open segment, embedded; its first token stands at place 0."""
        x_BND, places_BN = text.open.get("inputs_embeds"), text.open.get("position_ids")
        if x_BND is None:
            x_BND = self.decoder.get_input_embeddings()(text.open["input_ids"])
        if places_BN is None:
            places_BN = torch.arange(x_BND.shape[1], device=x_BND.device).expand(x_BND.shape[:2])
        return Tokens(x_BND, places_BN[..., None], text.padding_BN)

    def host(
        self,
        new: dict[str, Tensor],
        mask: Tensor | None,
        host_cache: DynamicCache | None,
        layers: Passage,
        options: dict[str, Any],
    ) -> Any:
        """The decoder's own forward."""
        extra = {"memory_passage": layers} if self.taps else {}
        with Handed(layers, self.taps, self.decoder):
            return type(self.decoder).forward(
                self.decoder,
                **new,
                attention_mask=mask,
                past_key_values=host_cache,
                use_cache=host_cache is not None,
                return_dict=True,
                **extra,
                **options,
            )
