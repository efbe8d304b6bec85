"""The forward of a decoder with a memory: what it is called with is read in segments, and the state carried.

Within a segment the memory is as the past has left it; it is written when the segment ends: behind `segment_length`
tokens, which a longer text is cut into, and at the end of a call. With `past_key_values` the next call goes on in the
open segment instead. Keys, values and positions begin anew with each segment.

A segment is that of a row: rows that are padded each begin at their own first token (`row_segments.py`), and rows of
several documents are read as a row for each (`packed_rows.py`).

Legend: B rows, M columns of the open segments and of a call, N tokens of a segment, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.integrations.attention_hooks import no_loss
from cached_transformers.integrations.memory_lookup import memory_of, refuse_frozen
from cached_transformers.integrations.offload import like_weights, with_weights
from cached_transformers.interfaces.incremental import enter_segment, needs_whole_segments
from cached_transformers.interfaces.memory import LayerMemory, ModelMemory, Tokens
from cached_transformers.layers.initial_state import initial_state_of
from cached_transformers.layers.stack import StackState
from cached_transformers.memories.parts.composite import members_of
from cached_transformers.models.documents import DocumentPlan
from cached_transformers.models.segments import read_segments
from cached_transformers.state import State, seal, used_again
from cached_transformers.state import check as check_state

from .config_utils import TAKE_MASKS, no_masks, parameter_names
from .context_tap import ContextTap
from .modeling import TransformersModel
from .output_state import Carried, handed_back
from .packed_rows import (
    COMPILED,
    KEYWORDS,
    NO_CACHE,
    WAY_OUT,
    Documents,
    documents_told,
    may_begin_again,
    read_packed,
    refuse_packed,
    refuse_told,
)
from .row_segments import Segment, put_together, refuse_masks, row_segments, stream_positions
from .segment_cache import DynamicCache, MemoryCache, SegmentCache
from .stream_tap import Passage, Running, StreamTap, slot_attentions_of, undeclared
from .through_host import HostThrough, call_for, joined, narrowed, passage_for, place_of_segment

COLUMNS = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids")
"""What a text is given as, in columns."""

is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
"""torch 2.6 does not tell export from torch.compile."""


class Call(NamedTuple):
    """What the host is called with for a segment, or for what there is of it.

    Attributes:
        tokens: ids or embeddings, types, places, (B, N, ...) each. padding_BN: True = padding.
        keeps: whether keys and values are kept. options: what else the host is called with.
    """

    tokens: dict[str, Tensor]
    padding_BN: Tensor | None
    keeps: bool = False
    options: dict[str, Any] = {}  # noqa: RUF012  (nobody writes into it)


class Answer(NamedTuple):
    """The host's output for a segment, the state after it, and keys and values where they are kept."""

    out: Any
    state: StackState
    host_cache: SegmentCache | None = None


class SegmentReader:
    """Cuts what a decoder is called with into segments and carries the state; `read` is what its forward becomes.

    Args:
        decoder: the module that embeds tokens and has the layers.
        taps: of the layers that have a memory. spans: whether the decoder has one that spans the layers.
        segment_length: tokens in a segment; None for one segment a call.

    Attributes:
        takes: what its forward is called with by name, beside what the host knows and the state.
        outside: the parameters of the forward of the model round the decoder.
    """

    takes: tuple[str, ...] = ("document_ids",)

    def __init__(self, decoder: nn.Module, taps: list[StreamTap], spans: bool, segment_length: int | None) -> None:
        self.decoder: Any = decoder
        self.taps, self.spans, self.segment_length = taps, spans, segment_length
        self.handed: Carried | None = None
        for name, whole in (("_read_apart", False), ("_read_documents", False), ("_told", True)):
            run = getattr(SegmentReader, name)
            if not hasattr(run, "_torchdynamo_disable"):  # not sooner, since it imports the compiler
                setattr(SegmentReader, name, torch.compiler.disable(run, recursive=whole))
        self.names = parameter_names(decoder)
        self.outside = self.names

    @property
    def in_loops(self) -> type[nn.Module]:
        """As what loops over segments call the model, which they give to it as `model`."""
        return TransformersModel

    def detach(self) -> None:
        """Take out of the host what the reader put there."""

    @property
    def memory(self) -> ModelMemory | None:
        """The memory that spans the layers, as it is now; None where there is none."""
        found = memory_of(self.decoder) if self.spans else None
        assert not isinstance(found, LayerMemory)
        return found

    def init_state(self, rows: int) -> StackState:
        """State of rows that have read nothing.

        Raises:
            ValueError: less than one row.
        """
        if rows < 1:
            raise ValueError(f"rows={rows} must be at least 1")
        tuned = initial_state_of(self.decoder)
        if tuned is not None:
            return tuned(rows)
        memory = self.memory
        like = like_weights(self.decoder, self.decoder.get_input_embeddings())
        model: State = () if memory is None else memory.init_state(rows, like)
        layers = tuple(tap.memory.init_state(rows, like_weights(self.decoder, tap.layer)) for tap in self.taps)
        clock_B = torch.zeros(rows, dtype=torch.long, device=like.device)
        return seal(StackState(clock_B, model, layers))  # type: ignore[no-any-return]

    def read(self, *args: Any, memory_state: State | None = None, **kwargs: Any) -> Any:
        """The decoder's forward over all segments; its output holds `memory_state` as well.

        Raises:
            ValueError: arguments that a memory cannot follow, or a state of another model or number of rows.
        """
        given, carried = self._given(args, kwargs, memory_state)
        found = self.documents(given) if carried.documents is None else carried.documents
        tuples = given.pop("return_dict", None) is False
        if found is not None and found.plan is not None:
            out, after = self._read_documents(given, found.plan, carried.state)
        else:
            given = given if found is None else found.with_mask(given)
            out, after = self._read_rows(given, carried.state)
        return handed_back(out, after, carried, tuples)

    def documents(self, given: dict[str, Any]) -> Documents | None:
        """What tells of documents is taken out of what the host is called with; None where rows are one text each.

        Raises:
            ValueError: as `documents_told`, or a text that goes on in its open segment is told of documents.
        """
        told = {name: given.pop(name) for name in KEYWORDS if name in given}
        told = {name: t for name, t in told.items() if t is not None}
        cache, first = given.get("past_key_values"), given.get("input_ids")
        first = given.get("inputs_embeds") if first is None else first
        if isinstance(cache, MemoryCache) and cache.tokens:
            refuse_told(told, NO_CACHE)
        elif first is not None and first.dim() > 1 and (told or may_begin_again(given.get("position_ids"))):
            read = documents_told if is_exporting() else self._told
            return read(told, given, *first.shape[:2])
        return None

    def _told(self, told: dict[str, Any], given: dict[str, Any], rows: int, columns: int) -> Documents | None:
        """Values are looked at outside of a graph."""
        return documents_told(told, given, rows, columns)

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
            return self._read_rows({**given, **tokens, **mask, "use_cache": False}, before)

        out, after = read_packed(read, new, plan, self._begun(state, rows), self.init_state)
        return out, seal(after)

    def _read_rows(self, given: dict[str, Any], state: State | None) -> tuple[Any, State | None]:
        """The host's output for rows of one text each, and the state after it, where somebody knows it."""
        new = {name: given.pop(name) for name in COLUMNS if name in given}
        self._check(new, given)
        first = new.get("input_ids", new.get("inputs_embeds"))
        assert first is not None
        rows, n = first.shape[:2]
        new = {name: t.expand(rows, *t.shape[1:]) for name, t in new.items()}
        text = self._text(given.pop("past_key_values", None), state, rows)
        padding_BM = self._padding(given.pop("attention_mask", None), text, rows, n)
        keeps = self._keeps(given.pop("use_cache", None))
        columns = text.with_new(new, padding_BM)
        if "position_ids" in new:
            refuse_packed(
                columns["position_ids"],
                padding_BM,
                f"position_ids begin again inside a row: {NO_CACHE if text.tokens else COMPILED} {WAY_OUT}",
            )
        total = text.length + n
        segments = row_segments(total, self.segment_length, padding_BM, keeps)
        text.tokens += n
        if text.host_cache is not None and segments[0].behind is None:
            text.take(columns, padding_BM, text.before)
            text.after = None  # whoever asks for it pays for it
            out = self._go_on(text, n, given)
        else:
            out = self._anew(text, columns, segments, keeps, given)
            out = out if total == n else narrowed(out, total - n, n)
        if keeps:
            out["past_key_values"] = text
        return out, text.after

    def _given(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], state: State | None
    ) -> tuple[dict[str, Any], Carried]:
        """What the host's forward was called with, by name, and the state on its way."""
        if self.memory is not None:
            refuse_frozen(self.memory)
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        given = {name: value for name, value in given.items() if value is not None}
        return given, state if isinstance(state, Carried) else self.handed or Carried(state)

    def _begun(self, state: State | None, rows: int) -> StackState:
        """The given state, or that of rows that have read nothing (ValueError: it is not this model's)."""
        if state is not None and not torch.compiler.is_compiling():
            check_state(state, self.init_state(1), rows)
        return self.init_state(rows) if state is None else state

    def _check(self, new: dict[str, Tensor], given: dict[str, Any]) -> None:
        if ("input_ids" in new) == ("inputs_embeds" in new):
            raise ValueError("give either input_ids or inputs_embeds")
        self._refuse_weights(given)
        kind = self.decoder.config._attn_implementation
        if kind not in TAKE_MASKS and any(isinstance(tap, ContextTap) for tap in self.taps):
            raise ValueError(f"the memory's slots need a mask: {no_masks(kind)}")
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

    def _refuse_weights(self, given: dict[str, Any]) -> None:
        """Refuse to show attention weights, which would leave out what was read from the memory (ValueError)."""
        if given.get("output_attentions", getattr(self.decoder.config, "output_attentions", False)):
            raise ValueError(
                "output_attentions=True: the weights of a segment would not say what its tokens read from the memory; "
                "leave it out, or call remove_memory(model) first"
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
        return MemoryCache(state, self._begun(state, rows), self.state_after)

    def _padding(self, mask: Any, text: MemoryCache, rows: int, n: int) -> Tensor | None:
        """(B, columns of the open segments and the call), True = no token of these; None where all are."""
        closed_BN = text.padding_BN  # or padding, as earlier calls had it
        if mask is None:
            return None if closed_BN is None else F.pad(closed_BN, (0, n), value=False)
        refuse_masks(mask, rows, text.tokens + n, ", those of past_key_values included")
        padding_BM = mask[:, text.tokens - text.length :] == 0
        return padding_BM if closed_BN is None else padding_BM | F.pad(closed_BN, (0, n), value=False)

    def _anew(
        self,
        text: MemoryCache,
        columns: dict[str, Tensor],
        segments: list[Segment],
        keeps: bool,
        options: dict[str, Any],
    ) -> Any:
        """The host's output for all columns, each segment read from its first token on.

        One that is full is read as a whole, whatever keys and values there are: it has to be written.
        """
        total, calls = next(iter(columns.values())).shape[1], []
        before = text.before
        for segment in segments:
            taken = {name: segment.take(t) for name, t in columns.items()}
            text.take(taken, segment.padding_BN, before + segment.before)
            calls.append(Call(text.call(), segment.padding_BN, keeps and segment.behind is None, options))
        apart = len(calls) > 1 and torch.compiler.is_compiling() and not is_exporting()
        answers = (self._read_apart if apart else self._read)(calls, text.state)
        outs, last = [answer.out for answer in answers], segments[-1]
        if last.behind is not None:
            text.close(answers[-1].state, before + last.behind)
        else:
            text.state = answers[-2].state if len(answers) > 1 else text.state
            text.after, text.host_cache = answers[-1][1:]
        aligned = all(isinstance(segment.columns, slice) for segment in segments)
        if aligned and sum(out.last_hidden_state.shape[1] for out in outs) == total:
            return joined(outs)
        return put_together(outs, segments, total)

    def _read(self, calls: list[Call], state: StackState) -> list[Answer]:
        """One segment after the other."""
        return list(read_segments(self._segment, calls, state))

    def _read_apart(self, calls: list[Call], state: StackState) -> list[Answer]:
        """The same while torch.compile traces: what reads a segment is a graph of its own, and serves all segments."""
        answers: list[Answer] = []
        for call in calls:
            answers.append(self._segment(call, answers[-1].state if answers else state))
        return answers

    def _go_on(self, text: MemoryCache, n: int, options: dict[str, Any]) -> Any:
        """The last tokens, behind those whose keys and values are kept; nothing is written."""
        call, state = text.call(), text.state
        positions_BNP, shift_B1 = stream_positions(call, text.padding_BN, state.clock_B)
        if self.memory is None:
            mask = None if text.padding_BN is None else (~text.padding_BN).long()
            padding_BN = None if text.padding_BN is None else text.padding_BN[:, -n:]
            layers = Passage(
                state.layers, positions_BNP, shift_B1, padding_BN, writes=False, host_cache=text.host_cache
            )
            new = {name: t[:, -n:] for name, t in call.items()}
            return self.host(new, mask, text.host_cache, layers, options)
        tokens = self._tokens(Call(call, text.padding_BN), positions_BNP)
        entry = with_weights(self.memory, enter_segment, self.memory, state.model, tokens, ())
        end = place_of_segment(entry, text.length, self.memory)[1] + text.length
        layers = passage_for(entry, end - n, end, state.layers, shift_B1, text.host_cache, writes=False)
        return self.host(*call_for(entry, end - n, end, shift_B1), text.host_cache, layers, options)

    def state_after(self, text: MemoryCache) -> State:
        """State after the open segment, which is read once more."""
        return self._segment(Call(text.call(), text.padding_BN), text.state).state

    def _segment(self, call: Call, state: StackState, reset_B: Tensor | None = None) -> Answer:
        """A segment from its first token on."""
        read = self._through_layers if self.memory is None else self._led
        with used_again() if call.keeps else nullcontext():  # an open segment begins with its state as it grows
            out, model, layers, host_cache = read(call, state, *self._where(call, state.clock_B))
        if host_cache is not None and (host_cache.again or not self._reads_alone()):
            host_cache = None
        return Answer(out, seal(StackState(state.clock_B + self._counted(call), model, layers)), host_cache)

    def _reads_alone(self) -> bool:
        """Whether what a token reads of the memories depends on no other token of its segment."""
        if self.memory is not None and needs_whole_segments(self.memory):
            return False
        return not any(needs_whole_segments(member) for tap in self.taps for member in members_of(tap.memory))

    def _where(self, call: Call, clock_B: Tensor) -> tuple[Tensor | None, Tensor]:
        """See `stream_positions`."""
        return stream_positions(call.tokens, call.padding_BN, clock_B)

    def _counted(self, call: Call) -> Tensor | int:
        """By how much the rows' clocks move on."""
        if call.padding_BN is None:
            return next(iter(call.tokens.values())).shape[1]
        return (~call.padding_BN).sum(1)

    def _through_layers(
        self, call: Call, state: StackState, positions_BNP: Tensor | None, shift_B1: Tensor
    ) -> tuple[Any, State, tuple[State, ...], SegmentCache | None]:
        """The host's output, the states of the memories, and keys and values where they are kept."""
        host_cache = SegmentCache(len(self.taps), self.decoder.config) if call.keeps else None
        layers = Passage(state.layers, positions_BNP, shift_B1, call.padding_BN, host_cache=host_cache)
        mask = None if call.padding_BN is None else (~call.padding_BN).long()
        out = self.host(call.tokens, mask, host_cache, layers, call.options)
        return out, (), tuple(layers.after), host_cache

    def _led(
        self, call: Call, state: StackState, positions_BNP: Tensor | None, shift_B1: Tensor
    ) -> tuple[Any, State, tuple[State, ...], SegmentCache | None]:
        """As `_through_layers`, where a memory leads the segment through the layers."""
        memory = self.memory
        assert memory is not None
        # Who goes through the layers in another way leaves keys and values of which nobody knows what they are.
        keeps = call.keeps and type(memory).run is ModelMemory.run
        # Of the config's kind, layers with a sliding window would drop keys, and could not give back those of the
        # memory's tokens behind the segment; the window is in the mask, too.
        host_cache = SegmentCache(len(self.taps)) if keeps else None
        depth = self.decoder.config.num_hidden_layers
        through = HostThrough(self.host, state.layers, host_cache, call.options, shift_B1, depth)
        tokens = self._tokens(call, positions_BNP)
        steps, model_state, loss = with_weights(memory, memory.run, state.model, tokens, through)
        no_loss(loss, memory)
        out = joined(through.outs)
        out["last_hidden_state"] = torch.cat(steps, 1)
        return out, model_state, through.states, host_cache

    def _tokens(self, call: Call, positions_BNP: Tensor | None) -> Tokens:
        """A segment, embedded."""
        x_BND = call.tokens.get("inputs_embeds")
        if x_BND is None:
            x_BND = self.decoder.get_input_embeddings()(call.tokens["input_ids"])
        assert positions_BNP is not None
        return Tokens(x_BND, positions_BNP, call.padding_BN)

    def host(
        self,
        new: dict[str, Tensor],
        mask: Tensor | None,
        host_cache: SegmentCache | None,
        layers: Passage,
        options: dict[str, Any],
    ) -> Any:
        """The decoder's own forward."""
        if layers.slots is not None:
            assert self.memory is not None
            layers.slot_attentions = slot_attentions_of(self.memory)
        if layers.offers is not None and not any(isinstance(tap, ContextTap) for tap in self.taps):
            assert self.memory is not None
            raise ValueError(undeclared(self.memory))
        extra = {"memory_passage": layers} if self.taps else {}
        with Running(layers, self.taps, self.decoder):
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
