"""Run a host's own forward over one segment, with the memory's state before it and the state after it.

A memory in the layers is read and written by hooks (`memory_hooks.py`). A model-level memory runs the host's blocks
itself, through a `HostBlockRunner`: its tokens take the host's first positions, and positions in the stream count from
the segment's first token.

Legend: B rows, N tokens of a segment, L tokens that they may see, D width, P position channels.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers.integrations.memory_hooks import MemoryHook, cache_name, no_loss, refuse_misspelt, rename_cache
from cached_transformers.integrations.memory_lookup import like_weights, memory_of, refuse_frozen, with_weights
from cached_transformers.integrations.segment_context import ModelCall, SegmentContext, running
from cached_transformers.interfaces.incremental import asked, asks, needs_whole_segments
from cached_transformers.interfaces.memory import (
    Entry,
    LayerMemory,
    ModelMemory,
    Projections,
    Query,
    Reading,
    Tokens,
    Trace,
)
from cached_transformers.layers.initial_state import initial_state_of
from cached_transformers.layers.stack import StackState
from cached_transformers.memories.parts.composite import members_of, recipe_of
from cached_transformers.models.untrained import OneSegmentSteps
from cached_transformers.state import State, kind_of, seal, used_again
from cached_transformers.state import check as check_state

from .adapter_utils import parameter_names
from .memory_cache import DynamicCache, MemoryCache, OpenedLayer
from .recurrent_layers import RecurrentHook
from .row_segments import Segment, in_order, joined, mapped, narrowed, stream_positions

try:
    from transformers.utils import ModelOutput
except ImportError:  # of use only with models of transformers, but imported without it
    ModelOutput = object

OUTPUT = "memory_state"

is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
"""torch 2.6 does not distinguish export from torch.compile."""


class HostForward:
    """The forward of a host with a memory. Subclasses cut its inputs into segments.

    Args:
        body: the module that embeds tokens and has the layers.
        hooks: of the layers that have a memory. spans: whether the body has a model-level memory.
        segment_length: tokens in a segment; None for one segment a call.

    Attributes:
        keywords: of its forward, besides those of the host and the state.
        loop_wrapper: the module through which loops over segments call the model; None where none does.
        names: parameters of the body's forward. outside: those of the model around the body.
        recurrent: hooks of the body's recurrent layers, whose states are the `model` of its state.
    """

    keywords: tuple[str, ...] = ()
    loop_wrapper: type[nn.Module] | None = None
    recurrent: Sequence[RecurrentHook] = ()

    def __init__(self, body: nn.Module, hooks: list[MemoryHook], spans: bool, segment_length: int | None) -> None:
        self.body: Any = body
        self.hooks, self.spans, self.segment_length = hooks, spans, segment_length
        self.steps = OneSegmentSteps()
        for name in ("_read_apart", "_read_rows_apart", "_read_documents", "eagerly"):
            run = getattr(type(self), name, None)
            if run is not None and not hasattr(run, "_torchdynamo_disable"):  # here, since it imports the compiler
                setattr(type(self), name, torch.compiler.disable(run, recursive=name == "eagerly"))
        self.names = self.outside = parameter_names(body)
        self.cache_name = cache_name(body)
        memories = recipe_of([*([self.memory] if spans else []), *(hook.memory for hook in hooks)])  # type: ignore[list-item]
        self.recipe = f"{memories} in {getattr(self.body.config, 'num_hidden_layers', 0)} layers"
        self.kind = kind_of(self.recipe)

    def uninstall(self) -> None:
        """Undo changes of the forward in the host."""
        for hook in self.recurrent:
            hook.tracked.uninstall()

    def eagerly(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a forward outside of a compiled graph."""
        return forward(*args, **kwargs)

    def forward(self, *args: Any, memory_state: State | None = None, **kwargs: Any) -> Any:
        """The body's forward over all segments; its output holds `memory_state`."""
        raise NotImplementedError("abstract: a forward cuts its inputs into segments")

    def documents(self, given: dict[str, Any]) -> Any:
        """The documents that the inputs tell of, which are taken out of them; None where rows are one text each."""
        return None

    def run(
        self, inputs: dict[str, Tensor], mask: Tensor | None, context: SegmentContext, options: dict[str, Any]
    ) -> Any:
        """The body's own forward, of one segment or a part of it."""
        raise NotImplementedError("abstract: a forward calls the host")

    def embed(self, segment: Segment) -> Tensor:
        """The segment's embedded tokens (B, N, D)."""
        raise NotImplementedError("abstract: a forward embeds its inputs")

    def positions(self, segment: Segment, clock_B: Tensor) -> tuple[Tensor | None, Tensor]:
        """Positions in the stream (B, N, 1), and the shift (B, 1) that makes position ids of them when added."""
        return stream_positions(segment.inputs, segment.padding_BN, clock_B)

    def count(self, segment: Segment) -> Tensor | int:
        """Tokens by which the rows' clocks advance."""
        if segment.padding_BN is None:
            return next(iter(segment.inputs.values())).shape[1]
        return (~segment.padding_BN).sum(1)

    @property
    def memory(self) -> ModelMemory | None:
        """The model-level memory as it is now; None where there is none."""
        found = memory_of(self.body) if self.spans else None
        assert not isinstance(found, LayerMemory)
        return found

    def init_state(self, rows: int) -> StackState:
        """State of rows that have read nothing (ValueError: less than one row)."""
        if rows < 1:
            raise ValueError(f"rows={rows} must be at least 1")
        tuned = initial_state_of(self.body)
        if tuned is not None:
            return tuned(rows)
        memory = self.memory
        like = like_weights(self.body, self.body.get_input_embeddings())
        model: State = () if memory is None else memory.init_state(rows, like)
        if self.recurrent:
            model = tuple(hook.init_state(rows, like_weights(self.body, hook.module)) for hook in self.recurrent)
        layers = tuple(hook.memory.init_state(rows, like_weights(self.body, hook.layer)) for hook in self.hooks)
        clock_B = torch.zeros(rows, dtype=torch.long, device=like.device)
        return seal(StackState(clock_B, model, layers, clock_B.new_empty(rows, 0, self.kind)))  # type: ignore[no-any-return]

    def checked_state(self, state: State | None, rows: int) -> StackState:
        """The given state, or that of rows that have read nothing (ValueError: it is not this model's)."""
        if state is not None and not torch.compiler.is_compiling():
            check_state(state, self.init_state(1), rows, memory=self.recipe)
        return self.init_state(rows) if state is None else state

    def note_step(self, state: State | None, tokens: int, segments: int) -> None:
        """Warn of training whose calls read one segment each and carry no state."""
        alone = state is None and segments == 1 and initial_state_of(self.body) is None
        self.steps.step(self.body, self.segment_length, tokens, alone)

    def call_of(self, state: State | None, embedded: Tensor | None) -> ModelCall:
        """The call of the model around the body, which got the state; a new one where the body itself is called."""
        if self.memory is not None:
            refuse_frozen(self.memory, embedded)
        outer: ModelCall | None = running().model
        return outer if outer is not None and outer.forward is self else ModelCall(self, state)

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the body's forward by name (ValueError: inputs without a row or a token)."""
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        refuse_misspelt(self.body, args, given)
        rename_cache(given, "past_key_values")
        for name in ("input_ids", "inputs_embeds", "pixel_values"):
            if 0 in getattr(given.get(name), "shape", ()):
                raise ValueError(f"{name} of shape {tuple(given[name].shape)} has nothing to read; leave the call out")
        return {name: value for name, value in given.items() if value is not None}

    def refuse_inputs(self, new: dict[str, Tensor], given: dict[str, Any]) -> None:
        """Raise ValueError unless there is one text, and no attention weights, which would leave the memory out."""
        if ("input_ids" in new) == ("inputs_embeds" in new):
            raise ValueError("give either input_ids or inputs_embeds")
        self.refuse_weights(given)

    def refuse_weights(self, given: dict[str, Any]) -> None:
        """Raise ValueError if attention weights are asked for."""
        if given.get("output_attentions", getattr(self.body.config, "output_attentions", False)):
            raise ValueError(
                "output_attentions=True: a segment's weights would leave out its tokens' reading of the memory; leave "
                "it out, or call remove_memory(model) first"
            )

    def read(
        self, segments: list[Segment], state: StackState, options: dict[str, Any], cache: MemoryCache | None = None
    ) -> list[tuple[Any, StackState]]:
        """[(output, state after it)] of segments that follow each other; `cache` is for a partial one."""
        if len(segments) > 1 and torch.compiler.is_compiling() and not is_exporting():
            return self._read_apart(segments, state, options, cache)
        return self._read_each(segments, state, options, cache)

    def _read_each(
        self, segments: list[Segment], state: StackState, options: dict[str, Any], cache: MemoryCache | None = None
    ) -> list[tuple[Any, StackState]]:
        answers = []
        for segment in segments:
            out, state = self.read_segment(segment, state, options, cache if segment.end is None else None)
            answers.append((out, state))
        return answers

    _read_apart = _read_each
    """The same outside of a compiled graph: `read_segment` is a graph of its own, which serves all segments."""

    def read_segment(
        self, segment: Segment, state: StackState, options: dict[str, Any], cache: MemoryCache | None = None
    ) -> tuple[Any, StackState]:
        """The host's output for a segment, from its first token on, and the state after it.

        Args:
            options: further arguments of the host. cache: gets the KV cache of the segment, to which tokens will come.
        """
        memory = self.memory
        model: State = ()
        with nullcontext() if cache is None else used_again():  # a partial segment begins with its state as it grows
            if memory is None:
                positions_BNP, shift_B1 = self.positions(segment, state.clock_B)
                places = positions_BNP, shift_B1, segment.padding_BN
                context = SegmentContext(state.layers, *places, recurrent=state.model)
                if cache is not None:
                    context.kv_cache, context.opened_layers = self._caches(self.body.config)
                mask = None if segment.padding_BN is None else (~segment.padding_BN).long()
                out = self.run(segment.inputs, mask, context, options)
                layers, model = tuple(context.states_after), tuple(context.recurrent_after)
            else:
                blocks, tokens = self._entered(segment, state, options)
                # A memory with a `run` of its own leaves keys and values of another order. Of the config's kind, layers
                # with a sliding window would drop keys; the window is in the mask, too.
                if cache is not None and type(memory).run is ModelMemory.run:
                    blocks.kv_cache, blocks.opened_layers = self._caches(None)
                steps, model, loss = with_weights(memory, memory.run, state.model, tokens, blocks)
                no_loss(loss, memory)
                out, layers, context = joined(blocks.outs), blocks.states, blocks.context
                out["last_hidden_state"] = torch.cat(steps, 1)
        if cache is not None:
            layers_of = [hook.memory for hook in self.hooks]
            members = [memory, *(member for held in layers_of for member in members_of(held))]
            whole = any(needs_whole_segments(member) for member in members if member is not None)
            cache.advances = any(hasattr(held, "advance") for held in layers_of)
            beside = [member for member in members[1:] if member not in layers_of]
            whole |= any(hasattr(member, "advance") for member in beside) or not cache.can_advance(segment.padding_BN)
            keeps = context.kv_cache is not None and not context.varies and not whole
            cache.kv, cache.opened_layers = (context.kv_cache, context.opened_layers) if keeps else (None, None)
            cache.recurrent = model if self.recurrent else ()
            cache.first = next(iter(segment.inputs.values())).shape[1]
        after = state._replace(clock_B=state.clock_B + self.count(segment), model=model, layers=layers)
        return out, seal(after)  # type: ignore[no-any-return]

    def _caches(self, config: Any) -> tuple[Any, list[OpenedLayer] | None]:
        if self.checkpoints:
            return None, None
        cache = DynamicCache(config=config)
        if self.recurrent:  # their places remain empty; transformers' own layers there cannot repeat rows
            places, empty = cache.layers, importlib.import_module("transformers.cache_utils").DummyLayer
            cache.layers = [layer if hasattr(layer, "batch_repeat_interleave") else empty() for layer in places]
        return cache, [OpenedLayer() for _ in self.hooks]

    @property
    def checkpoints(self) -> bool:
        """Return True if the host's blocks run again in the backward pass; they then take no KV cache."""
        return self.body.training and any(getattr(m, "gradient_checkpointing", False) for m in self.body.modules())

    def _entered(self, segment: Segment, state: StackState, options: dict[str, Any]) -> tuple[HostBlockRunner, Tokens]:
        """Arguments of a model-level memory that runs a segment: the host's blocks, and the tokens."""
        positions_BNP, shift_B1 = self.positions(segment, state.clock_B)
        blocks = HostBlockRunner(self.run, state.layers, options, shift_B1, self.body.config.num_hidden_layers)
        x_BND = self.embed(segment)
        if positions_BNP is None:
            positions_BNP = torch.arange(x_BND.shape[1], device=x_BND.device).expand(x_BND.shape[:2])[..., None]
        return blocks, Tokens(x_BND, positions_BNP, segment.padding_BN)

    def ask(self, segment: Segment, state: StackState, options: dict[str, Any]) -> StackState:
        """The state with the choice of a prompt's last segment; see `interfaces.incremental`."""
        memory = self.memory
        if memory is None or not asks(memory):
            return state
        blocks, tokens = self._entered(segment, state, options)
        with used_again():
            return state._replace(model=with_weights(memory, asked, memory, state.model, tokens, blocks))


class HostBlockRunner:
    """Runs a host's blocks for a model-level memory, over one segment; see `interfaces.memory`.

    Args:
        run: the body's own forward, `HostForward.run`. options: its further arguments.
        shift_B1: makes position ids of positions in the stream. depth: number of layers.

    Attributes:
        layers: empty, since a host's projections are not known.
        states: of the layer memories, as the last call that writes has left them.
        outs: the host's output of each call that writes, for the segment's tokens.
        kv_cache, opened_layers: see `SegmentContext`. context: of the last call.
    """

    layers: Sequence[Projections] = ()

    def __init__(
        self, run: Callable[..., Any], states: tuple[State, ...], options: dict[str, Any], shift_B1: Tensor, depth: int
    ) -> None:
        self.run, self.states, self.options, self.shift_B1, self.depth = run, states, options, shift_B1, depth
        self.kv_cache: Any = None
        self.opened_layers: list[OpenedLayer] | None = None
        self.outs: list[Any] = []
        self.context: Any = None

    def __call__(self, entry: Entry, *, write: bool = True) -> tuple[Tensor, list[Trace]]:
        """The host's output; the traces of all layers, or one of the whole host where not all layers have a memory."""
        x_BND, positions_BNP, padding_BN = entry.tokens[:3]
        total = x_BND.shape[1]
        start, length = entry.segment or (0, total)
        entry, order_BL = padding_first(entry, length)
        self.context = context = entry_context(entry, 0, total, self.states, self.shift_B1, writes=write)
        context.kv_cache, context.opened_layers = self.kv_cache, self.opened_layers
        context.back_BL = back_BL = None if order_BL is None else order_BL.argsort(dim=1)
        out = self.run(*entry_inputs(entry, 0, total, self.shift_B1), context, self.options)
        if back_BL is not None:
            out = mapped([out], lambda parts: in_order(parts[0], back_BL))
        y_BND = out.last_hidden_state
        if write:
            self.states = tuple(context.states_after)
            self.outs.append(narrowed(out, start, length))
        if self.kv_cache is not None and total > start + length:
            self.kv_cache.crop(start + length - total)
        traces = [trace for trace in context.traces or () if trace is not None]
        if len(traces) == self.depth:
            return y_BND, traces
        query = Query(x_BND, positions_BNP=positions_BNP, padding_BN=padding_BN)
        return y_BND, [Trace(x_BND, y_BND, query, Reading())]


def padding_first(entry: Entry, columns: int) -> tuple[Entry, Tensor | None]:
    """The entry with the padding of the segment's first `columns` before memory tokens and text, since the host counts
    its windows in columns; and the former columns (B, L), None where all remain. A mask of the memory has no window.
    """
    padding_BN = entry.tokens.padding_BN
    if padding_BN is None or entry.visible_NN is not None or entry.segment is None:
        return entry, None
    real_BL = ~padding_BN
    real_BL[:, _front(entry) + columns :] = True  # follow in a KV cache
    order_BL = real_BL.long().argsort(dim=1, stable=True)
    x_BND, positions_BNP, padding_BN = (in_order(t, order_BL) for t in entry.tokens[:3] if t is not None)
    return entry._replace(tokens=Tokens(x_BND, positions_BNP, padding_BN)), order_BL


def entry_context(
    entry: Entry, first: int, end: int, states: tuple[State, ...], shift_B1: Tensor, *, writes: bool
) -> SegmentContext:
    """The context of the tokens first..end of an entry."""
    tokens = entry.tokens
    padding_BN = None if tokens.padding_BN is None else tokens.padding_BN[:, first:end]
    places = tokens.positions_BNP[:, :end], shift_B1 + _front(entry), padding_BN
    given: dict[str, Any] = {"segment": entry.segment, "offers": entry.contexts, "slots": entry.slots}
    traced = first == 0  # a partial segment that continues leaves none
    return SegmentContext(states, *places, writes=writes, traced=traced, **given)


def entry_inputs(entry: Entry, first: int, end: int, shift_B1: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
    """The host's inputs for the tokens first..end of an entry, and its mask over all tokens up to there."""
    x_BND, positions_BNP, padding_BN = entry.tokens[:3]
    ids_BN = (positions_BNP[:, first:end, 0] + shift_B1 + _front(entry)).clamp(min=0)
    inputs = {"inputs_embeds": x_BND[:, first:end], "position_ids": ids_BN}
    rows, total = x_BND.shape[:2]
    if entry.visible_NN is None:
        # Without a mask, transformers takes positions that do not rise by one for packed documents.
        keep_BN = x_BND.new_ones(rows, total, dtype=torch.bool) if padding_BN is None else ~padding_BN
        return inputs, keep_BN[:, :end].long()
    visible_BNL = entry.visible_NN[first:end, :end].expand(rows, -1, -1)
    if padding_BN is not None:
        itself_NL = torch.eye(total, dtype=torch.bool, device=x_BND.device)[first:end, :end]
        visible_BNL = visible_BNL & (~padding_BN[:, None, :end] | itself_NL)
    lowest = torch.finfo(x_BND.dtype).min
    return inputs, torch.zeros_like(visible_BNL, dtype=x_BND.dtype).masked_fill(~visible_BNL, lowest)[:, None]


def _front(entry: Entry) -> int:
    """Tokens of the memory before the segment's."""
    return 0 if entry.segment is None else entry.segment[0]


def extra_tokens(entry: Entry, tokens: int, memory: ModelMemory) -> tuple[int, int]:
    """Number of the memory's tokens in an entry for a segment of `tokens`, and of those before the segment.

    Raises:
        ValueError: there are some, and the memory does not give their place.
    """
    total = entry.tokens.x_BND.shape[1]
    if entry.segment is None and total != tokens:
        raise ValueError(
            f"memory {type(memory).__name__} makes {total} tokens of a segment of {tokens} and does not give their "
            "place; give Entry.segment=(start, length)"
        )
    return total - tokens, _front(entry)


def _rebuild(kind: type, fields: dict[str, Any]) -> Any:
    """An output that was pickled."""
    return output_with_state(kind)(**fields)


_KINDS: dict[type, type] = {}


def output_with_state(kind: type) -> type:
    """The host's class of outputs with a field for the state: torch.export takes an output apart by its fields."""
    if kind not in _KINDS:
        fields: dict[str, Any] = {"__annotations__": {OUTPUT: Any}, OUTPUT: None, "__doc__": kind.__doc__}
        fields["__reduce__"] = lambda self: (_rebuild, (kind, dict(self.items())))
        _KINDS[kind] = dataclasses.dataclass(type(kind.__name__, (kind,), fields))
    return _KINDS[kind]


def prepare_outputs(*modules: nn.Module) -> None:
    """Make the classes that the outputs of these modules of transformers will have.

    A graph that is being traced cannot make one, nor does transformers then tell torch of a class that is new.
    """
    names = {kind.__module__ for module in modules for kind in type(module).__mro__}
    for part in [sys.modules[name] for name in names if name in sys.modules]:
        for kind in list(vars(part).values()):
            if isinstance(kind, type) and issubclass(kind, ModelOutput) and dataclasses.is_dataclass(kind):
                output_with_state(kind)


def with_state(out: Any, state: State) -> Any:
    """The host's output with the state in it."""
    return output_with_state(type(out))(**dict(out.items()), **{OUTPUT: state})


def returned(out: Any, after: State | None, call: ModelCall, as_tuple: bool) -> Any:
    """The output with the state after it, where it is known, which the call of the model around the body gets, too."""
    if after is not None:
        call.state_after = after
        out = with_state(out, after)
    return out.to_tuple() if as_tuple else out
