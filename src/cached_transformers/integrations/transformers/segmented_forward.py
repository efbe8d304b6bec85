"""The forward of a decoder with a memory: cut its inputs into segments, and carry the state.

Within a segment the memory is as the past has left it; it is written when the segment ends: after `segment_length`
tokens, and at the end of a call. With `past_key_values` the next call continues the partial segment instead. Keys,
values and positions begin again with each segment.

A segment is one of each row: rows that are padded begin at their own first token (`row_segments.py`), and rows of
several documents are read as a row for each (`packed_rows.py`).

Legend: B rows, M columns of the partial segments and of a call, N tokens of a segment, D width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.checks import insist, none_true
from cached_transformers.integrations.memory_hooks import run_host, slot_attentions_of, undeclared
from cached_transformers.integrations.memory_lookup import with_weights
from cached_transformers.integrations.models import TransformersModel
from cached_transformers.integrations.segment_context import SegmentContext, running
from cached_transformers.interfaces.incremental import open_segment
from cached_transformers.interfaces.memory import Tokens
from cached_transformers.layers.stack import StackState
from cached_transformers.models.documents import DocumentPlan
from cached_transformers.state import State, reset, seal

from .adapter_utils import TAKE_MASKS, no_masks
from .host_forward import HostForward, entry_context, entry_inputs, extra_tokens, is_exporting, padding_first, returned
from .memory_cache import PADDED, DynamicCache, MemoryCache
from .packed_rows import (
    BOUNDS,
    COMPILED,
    NO_CACHE,
    WAY_OUT,
    PackedDocuments,
    documents_told,
    may_begin_again,
    read_packed,
    refuse_other_bounds,
    refuse_packed,
    refuse_told,
)
from .row_segments import Segment, in_columns, joined_segments, narrowed, refuse_masks, row_segments, stream_positions

COLUMNS = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids")
"""Inputs that have columns."""


class DecoderForward(HostForward):
    """The forward of a decoder, with documents in its rows and a KV cache of the partial segment."""

    keywords = ("document_ids",)
    loop_wrapper = TransformersModel

    def forward(self, *args: Any, memory_state: State | None = None, **kwargs: Any) -> Any:
        """The decoder's forward over all segments; its output holds `memory_state`.

        Raises:
            ValueError: arguments that a memory cannot follow, or a state of another model or number of rows.
        """
        call, given = self.call_of(memory_state, kwargs.get("inputs_embeds")), self.named(args, kwargs)
        found = self.documents(given) if call.documents is None else call.documents
        as_tuple = given.pop("return_dict", None) is False
        if found is not None and found.plan is not None:
            out, after = self._read_documents(given, found.plan, call.state)
        else:
            given = given if found is None else found.with_mask(given)
            out, after = (self._read_rows_apart if self._apart(given) else self._read_rows)(given, call.state)
        return returned(out, after, call, as_tuple)

    def documents(self, given: dict[str, Any]) -> PackedDocuments | None:
        """Take the documents out of the host's arguments; None where rows are one text each.

        Raises:
            ValueError: as `documents_told`, or documents beside a partial segment.
        """
        bounds = {name: t for name in BOUNDS if (t := given.pop(name, None)) is not None}
        ids, positions = given.pop("document_ids", None), given.get("position_ids")
        if ids is None and positions is None:
            refuse_told(bounds, "a memory reads document_ids or position_ids that begin again; give these, or")
        cache, first = given.get("cache", given.get("past_key_values")), given.get("input_ids")
        first = given.get("inputs_embeds") if first is None else first
        found = None
        if isinstance(cache, MemoryCache) and cache.tokens:
            refuse_told({"document_ids": ids}, NO_CACHE)
        elif first is not None and first.dim() > 1 and (ids is not None or may_begin_again(positions)):
            call = (documents_told, ids, given, *first.shape[:2])
            found = call[0](*call[1:]) if is_exporting() else self.eagerly(*call)
        if bounds and first is not None and not torch.compiler.is_compiling():
            refuse_other_bounds(bounds, found, len(first))
        return found

    def _read_documents(self, given: dict[str, Any], plan: DocumentPlan, state: State | None) -> tuple[Any, State]:
        """The host's output for rows of several documents, and the state after the last one of each."""
        if given.pop("use_cache", None) or given.get("past_key_values") is not None:
            raise ValueError(f"use_cache and past_key_values beside several documents in a row: {NO_CACHE} {WAY_OUT}")
        rows, columns = plan.source_BN.shape
        if (mask := given.pop("attention_mask", None)) is not None:  # documents know it already
            refuse_masks(mask, rows, columns)
        new = {name: given.pop(name) for name in COLUMNS if name in given}
        new = {name: t.expand(rows, *t.shape[1:]) for name, t in new.items()}

        def read(tokens: dict[str, Tensor], padding_BN: Tensor | None, before: State) -> tuple[Any, State | None]:
            mask = {} if padding_BN is None else {"attention_mask": (~padding_BN).long()}
            return self._read_rows({**given, **tokens, **mask, "use_cache": False}, before, noted=True)

        longest = plan.groups[0].places_Pn.shape[1]
        self.note_step(state, longest, -(-longest // (self.segment_length or longest)))
        out, after = read_packed(read, new, plan, self.checked_state(state, rows), self.init_state)
        return out, seal(after)

    def _apart(self, given: dict[str, Any]) -> bool:
        """Return True for several segments in a compiled call: a graph of all would serve one number of tokens."""
        if self.segment_length is None or not torch.compiler.is_compiling() or is_exporting():
            return False
        first = given.get("input_ids", given.get("inputs_embeds"))
        return first is not None and first.shape[1] > self.segment_length

    def _read_rows(self, given: dict[str, Any], state: State | None, noted: bool = False) -> tuple[Any, State | None]:
        """The host's output for rows of one text each, and the state after it, where it is known already."""
        prepare, read, join = self._prepare, self.read, self._join
        if not torch.compiler.is_compiling():  # perhaps `_read_rows_apart`: its graph is `read_segment` only
            prepare, read, join = partial(self.eagerly, prepare), self._read_apart, partial(self.eagerly, join)
        text, inputs, padding_BM, segments, n, keeps = prepare(given, state)
        if not noted:
            self.note_step(state, text.length + n, len(segments))
        cache = given.pop("past_key_values", None)
        asks = keeps and running().prompt_end == text.tokens
        continues = text.kv is not None and segments[0].end is None and not self.checkpoints and not asks
        if continues and text.can_advance(padding_BM, n):
            text.take(inputs, padding_BM, text.before)
            text.state_after = None  # computed on demand
            out = self._read_next(text, n, given)
        else:
            text.opened = None
            if asks:
                answers = self._read_prompt(segments, text, given)
            else:
                answers = read(segments, text.state, given, text if keeps else None)
            out = join(text, inputs, segments, answers, n, asks)
        if keeps:
            out[self.cache_name] = text if cache is None or cache is text else text.replace(cache)
        return out, text.state_after

    _read_rows_apart = _read_rows

    def _prepare(self, given: dict[str, Any], state: State | None) -> tuple[Any, ...]:
        """The text, which notes the call's tokens; all inputs of its partial segment and the call; their padding; their
        segments; the number of the call's columns; whether to keep a cache."""
        new = {name: given.pop(name) for name in COLUMNS if name in given}
        self._refuse(new, given)
        first = new.get("input_ids", new.get("inputs_embeds"))
        assert first is not None
        rows, n = first.shape[:2]
        new = {name: t.expand(rows, *t.shape[1:]) for name, t in new.items()}
        text = self.text_of(given.get("past_key_values"), state, rows)
        keeps = self._keeps(given.pop("use_cache", None))
        padding_BM = _padding(given.pop("attention_mask", None), text, rows, n)
        looks = keeps or self.recurrent  # generate gives a mask of ones; recurrent layers read around padding
        if padding_BM is not None and looks and none_true(padding_BM):
            padding_BM = None
        if padding_BM is not None and self.recurrent and is_exporting():
            raise ValueError(
                "attention_mask: recurrent layers read rows by their lengths, which no exported graph can do"
            )
        inputs = text.with_new(new, padding_BM, self.embed_ids)
        if "position_ids" in new:
            why = f"position_ids begin again inside a row: {NO_CACHE if text.tokens else COMPILED} {WAY_OUT}"
            refuse_packed(inputs["position_ids"], padding_BM, why)
        segments = row_segments(inputs, self.segment_length, padding_BM, keeps, text.before)
        text.note(new, None if padding_BM is None else padding_BM[:, text.length :])
        return text, inputs, padding_BM, segments, n, keeps

    def _join(
        self, text: MemoryCache, inputs: dict[str, Tensor], segments: list[Segment], answers: Any, n: int, asks: bool
    ) -> Any:
        """The host's output for the last `n` columns, of the answers for all segments; the text keeps the partial one.

        A full segment is read as a whole, even if a KV cache holds its first tokens: it must be written. If the last
        one `asks`, it is read twice.
        """
        outs, last, columns = [out for out, _ in answers], segments[-1], next(iter(inputs.values())).shape[1]
        if last.end is not None:
            text.close(answers[-1][1], last.end)
        else:
            inputs = {name: in_columns(t, last.columns) for name, t in inputs.items()}
            text.take(inputs, last.padding_BN, last.before)
            text.state = answers[-2][1] if len(answers) > 1 and not asks else text.state
            text.state_after = answers[-1][1]
        out = joined_segments(outs, segments, columns)
        return out if columns == n else narrowed(out, columns - n, n)

    def _read_prompt(
        self, segments: list[Segment], text: MemoryCache, given: dict[str, Any]
    ) -> list[tuple[Any, StackState]]:
        """`read` of a prompt; each row asks with the last segment that holds a token of it."""
        answers, state = [], text.state
        padded = [segment.padding_BN for segment in segments]
        real_SB = torch.stack([torch.ones_like(state.clock_B) if t is None else (~t).any(1).long() for t in padded])
        last_B = (real_SB.cumsum(0) * real_SB).argmax(0)
        for number, segment in enumerate(segments):
            if bool((last_B == number).any()):
                state = reset(state, self.ask(segment, state, given), last_B == number)
            text.state = state if segment.end is None else text.state
            answers.append(self.read_segment(segment, state, given, text if segment.end is None else None))
            state = answers[-1][1]
        return answers

    def _read_next(self, text: MemoryCache, n: int, options: dict[str, Any]) -> Any:
        """The last `n` tokens, after those in the KV cache; no memory is written."""
        inputs, state, memory = text.segment_inputs(), text.state, self.memory
        positions_BNP, shift_B1 = stream_positions(inputs, text.padding_BN, state.clock_B)
        if memory is None:
            mask = None if text.padding_BN is None else (~text.padding_BN).long()
            padding_BN = None if text.padding_BN is None else text.padding_BN[:, -n:]
            places = positions_BNP, shift_B1, padding_BN
            context = SegmentContext(state.layers, *places, writes=False, recurrent=text.recurrent)
            call = {name: t[:, -n:] for name, t in inputs.items()}, mask
        else:
            tokens = Tokens(self.embed(Segment(inputs)), positions_BNP, text.padding_BN)
            opened = text.opened
            if opened is None:
                opened = with_weights(memory, open_segment, memory, state.model, tokens, ())
                text.opened = None if hasattr(memory, "advance") else opened
            entry = with_weights(memory, memory.enter, opened, tokens)
            end = extra_tokens(entry, text.length, memory)[1] + text.length
            entry = padding_first(entry, text.first)[0]
            context = entry_context(entry, end - n, end, state.layers, shift_B1, writes=False)
            call = entry_inputs(entry, end - n, end, shift_B1)
        context.kv_cache, context.opened_layers = text.kv, text.opened_layers
        out = self.run(*call, context, options)
        text.recurrent = tuple(context.recurrent_after)
        return out

    def ask_prompt(self, ids_BN: Tensor, state: State) -> State:
        """The state with the choice of a prompt's last segment."""
        return self.ask(Segment({"input_ids": ids_BN}), state, {})

    def state_after(self, text: MemoryCache) -> State:
        """State after the partial segment, which is read once more."""
        return self.read_segment(Segment(text.segment_inputs(), text.padding_BN), text.state, {})[1]

    def _refuse(self, new: dict[str, Tensor], given: dict[str, Any]) -> None:
        self.refuse_inputs(new, given)
        kind = self.body.config._attn_implementation
        if kind not in TAKE_MASKS and any(hook.attends_context for hook in self.hooks):
            raise ValueError(f"the memory's slots need a mask: {no_masks(kind)}")
        if given.get("output_router_logits", getattr(self.body.config, "output_router_logits", False)):
            raise ValueError(
                "output_router_logits=True: the loss that balances the experts takes its tokens for one text, and a "
                "memory reads segments; leave it out and set config.output_router_logits=False"
            )
        if "encoder_hidden_states" in given:
            raise ValueError("encoder_hidden_states: a decoder with a memory attends no encoder; leave them out")
        if self.memory is not None and "token_type_ids" in new:
            raise ValueError(
                "token_type_ids: tokens of a memory have no type; leave them out, or take a memory in the layers"
            )

    def _keeps(self, use_cache: bool | None) -> bool:
        """Return True to keep a cache. In training transformers' default would keep one that nothing reads."""
        if use_cache is None:
            use_cache = getattr(self.body.config, "use_cache", False) and not self.body.training
        return bool(use_cache) and not (self.checkpoints and torch.is_grad_enabled())

    def text_of(self, cache: Any, state: State | None, rows: int) -> MemoryCache:
        """The text that the call continues, or a new one (ValueError: the memory cannot continue it)."""
        if isinstance(cache, MemoryCache):
            if state is not None and not cache.began_with(state):
                raise ValueError(
                    "past_key_values hold a segment that began with another memory_state; give only the state to begin "
                    "a new segment, or only past_key_values to continue"
                )
            found = rows if cache.read_BT is None else len(cache.read_BT)
            if found != rows:
                raise ValueError(f"past_key_values hold {found} rows, the call {rows}; give the same rows")
            return cache
        if cache is not None and not isinstance(cache, MemoryCache):
            if type(cache) is not DynamicCache or cache.offloading:
                raise ValueError(
                    f"past_key_values of type {type(cache).__name__}: a segment's keys and values need a DynamicCache, "
                    "which can begin again; leave cache_implementation at its default"
                )
            if cache.get_seq_length():
                raise ValueError(
                    "past_key_values were not made by this model with its memory (prefix tuning makes some, too); pass "
                    "those of its last output, or none"
                )
        return MemoryCache(state, self.checked_state(state, rows), self.state_after)

    def embed(self, segment: Segment) -> Tensor:
        x_BND = segment.inputs.get("inputs_embeds")
        return self.embed_ids(segment.inputs["input_ids"]) if x_BND is None else x_BND

    def embed_ids(self, ids_BN: Tensor) -> Tensor:
        """The host's embeddings of tokens (B, N, D)."""
        return self.body.get_input_embeddings()(ids_BN)  # type: ignore[no-any-return]

    def run(
        self, inputs: dict[str, Tensor], mask: Tensor | None, context: SegmentContext, options: dict[str, Any]
    ) -> Any:
        if context.slots is not None:
            assert self.memory is not None
            context.slot_attentions = slot_attentions_of(self.memory)
        if context.offers is not None and not any(hook.attends_context for hook in self.hooks):
            assert self.memory is not None
            raise ValueError(undeclared(self.memory))
        # As a keyword, too, which reaches the layer where a third-party wrapper checkpoints the block.
        keyword = {"segment_context": context} if self.hooks else {}
        kv_cache, call = context.kv_cache, {**inputs, "attention_mask": mask, "return_dict": True, **keyword, **options}
        for recurrent in self.recurrent:
            recurrent.tracked.follow()
        call |= {self.cache_name: kv_cache, "use_cache": kv_cache is not None}
        out = run_host(context, self.hooks, self.body, **call)
        for recurrent in self.recurrent:
            recurrent.check_read(context)
        return out


def _padding(mask: Any, text: MemoryCache, rows: int, n: int) -> Tensor | None:
    """(B, columns of the partial segment and the call), True = no token of these; None where all are."""
    earlier_BN = text.padding_BN  # of columns in an order of their own
    if mask is None:
        return None if earlier_BN is None else F.pad(earlier_BN, (0, n), value=False)
    refuse_masks(mask, rows, text.tokens + n, ", those of past_key_values included")
    if text.read_BT is not None:
        if earlier_BN is None and none_true(mask == 0):  # as generate gives it at each token
            return None
        why = "attention_mask: 0 at a token that past_key_values have read; leave them out and give the whole text"
        insist(~((mask[:, : text.tokens] == 0) & (text.read_BT != PADDED)).any(), why)
    padding_BM = mask[:, text.tokens - text.length :] == 0
    return padding_BM if earlier_BN is None else torch.cat([earlier_BN, padding_BM[:, text.length :]], 1)
