"""Let a memory into one attention layer of a host model.

Hooks record the layer's arguments; its output projection mixes the memory in before it projects. A memory with
a state finds it in the `SegmentContext`, and is written when the block around the layer returns, from the block's input
and output, as in a stack.

Legend: B rows, N tokens, L tokens of the partial segment up to here, H heads, E head width, D = H * E model width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cached_transformers.interfaces.incremental import read_segment
from cached_transformers.interfaces.memory import LayerMemory, Linear, ModelMemory, ProjectKV, Query, Reading, Trace

from .hosts import Host, Site
from .memory_lookup import memory_of, refuse_frozen, with_weights
from .segment_context import AttentionCall, SegmentContext, capture_checkpoints, entered, running
from .tracked_modules import TrackedModule, track

SLOT_ATTENTIONS = "slot_attentions"
"""Child of a model-level memory that holds the cross-attentions to its slots: they train, move and save with it."""


class MemoryHook:
    """Lets a memory into one attention layer.

    The memory is the one that the layer has when it is called, and acts on the module that is then the projection: an
    adapter around the projection sees the heads with the memory mixed in, and can be merged.

    Args:
        number: place of the layer among those that have a memory with a state; None for a memory without one, which
            runs without a context.
    """

    attends_context = False
    """True if the layer attends slots before its segment."""

    def __init__(self, site: Site, host: Host, number: int | None = None) -> None:
        assert host.projection is not None
        self.layer, self.heads, self.make_query = site.layer, host.heads, host.query
        self.number: Any = number
        self.projection = track(site, host.projection, forward=self.project)
        self.tracked = [self.projection]
        self.sources: list[TrackedModule] = []
        self.handles: list[RemovableHandle] = []
        if number is not None:
            assert host.stream is not None
            self.split, first = host.stream.split, host.stream.sources[0][0]
            self.first = track(site, first, on_output=self.correct)
            for place, chain in enumerate(host.stream.sources):
                self.sources.append(track(site, chain[-1], on_output=partial(self.keep, place)))
            self.block = track(site, host.stream.block, on_input=self.enter_block, on_output=self.leave_block)
            self.tracked += [*self.sources, self.block]

    @property
    def memory(self) -> LayerMemory:
        """The layer's memory as it is now."""
        found = memory_of(self.layer)
        assert isinstance(found, LayerMemory)
        return found

    def install(self, memory: LayerMemory) -> None:
        """Put the memory into the layer."""
        self.layer.memory = memory
        if "queries" in memory.needs:
            self.tracked.insert(0, self.first)  # its hook runs before that of a source, which may be the same module
        for module in self.tracked:
            module.follow()
        self.handles.append(self.layer.register_forward_pre_hook(self.enter_layer, with_kwargs=True))
        self.handles.append(self.projection.root.register_forward_hook(self.check_projected))
        self.layer.uninstall_memory = self.uninstall

    def uninstall(self, layer: nn.Module) -> None:
        """Give the layer and its projection their own code back."""
        for module in self.tracked:
            module.uninstall()
        for handle in self.handles:
            handle.remove()

    def enter_block(self, *args: Any, **kwargs: Any) -> Any:
        """Record the block's input, the first argument, which the reading of slots may replace."""
        context: SegmentContext | None = kwargs.get("segment_context", running().segment)
        if context is None:
            return None
        given = args[0] if args else next(iter(kwargs.values()))
        context.inputs[self.number] = x_BND = context.read_slots(self.number, given)
        if context.slots is None:
            return None
        if args:
            return (x_BND, *args[1:]), kwargs
        return args, {**kwargs, next(iter(kwargs)): x_BND}

    def enter_layer(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Ask the memory, where it is read before the layer attends; its projection will do the rest."""
        memory = self.memory
        refuse_frozen(memory, args[0] if args else kwargs.get("hidden_states"))
        for module in self.tracked:
            module.follow()
        if self.number is None:
            running().attention = AttentionCall(self, self.make_query(*args, **kwargs))
            return None
        # The layer's own attention function need not know this keyword.
        context: SegmentContext | None = kwargs.pop("segment_context", running().segment)
        if context is None:
            raise ValueError(
                f"{type(layer).__name__} has a memory and was called without its state; call the model that "
                "add_memory was given, and checkpoint activations by its own gradient_checkpointing_enable()"
            )
        if context.grad and not torch.is_grad_enabled():
            raise ValueError(
                "use_reentrant=True: reentrant activation checkpointing would detach the memory from the graph; leave "
                "use_reentrant=False, transformers' default"
            )
        if type(memory) is LayerMemory and not (context.writes or context.traces or context.offers):
            return args, kwargs  # only a model-level memory would want the trace
        x_BND = args[0] if args else kwargs["hidden_states"]
        positions_BNP, segment = context.positions_of_last(x_BND), context.segment_of_last(x_BND.shape[1])
        query = Query(x_BND, positions_BNP=positions_BNP, padding_BN=context.padding_BN, segment=segment)
        call = AttentionCall(self, query, context)
        call.reading = self.read_early(call, context, kwargs)
        call.term_BND = None if call.reading is None else call.reading.query_BND
        running().attention = call
        return args, kwargs

    def read_early(self, call: AttentionCall, context: SegmentContext, kwargs: dict[str, Any]) -> Reading | None:
        """The memory's answer before the layer attends; None where it is read with queries.

        Args:
            kwargs: of the layer's call, which may be changed.
        """
        if "queries" not in self.memory.needs:
            return None
        reading = with_weights(self.memory, self.read, call.query, context, None)
        if reading.context is not None:
            raise ValueError(undeclared(self.memory))
        return reading

    def correct(self, output_BNL: Tensor) -> Tensor | None:
        """Queries with the memory's term, in the output of the first projection, which may hold keys and values."""
        call = running().attention
        if call is None or call.hook is not self or call.term_BND is None:
            return None
        term_BND, call.term_BND = call.term_BND.to(output_BNL.dtype), None
        if term_BND.shape[-1] == output_BNL.shape[-1]:
            return output_BNL + term_BND
        return output_BNL.index_add(-1, query_columns(self.split, output_BNL), term_BND)

    def keep(self, place: int, output: Tensor) -> None:
        """Record the output of a module that gives queries, keys or values."""
        call = running().attention
        if call is not None and call.hook is self:
            call.projected[place] = output

    def project(self, y_BND: Tensor, **options: Any) -> Tensor:
        """The forward of the projection, of the merged heads; `options` are an adapter's."""
        calls = running()
        linear, call = partial(self.projection.original, **options), calls.attention
        if call is None or call.hook is not self:  # it is not the layer that calls
            return linear(y_BND)
        # The memory attends while the layer's forward still runs, where `replace_attention` may wait for its attention.
        calls.attention, calls.aside = None, True
        try:
            return with_weights(self.memory, self.mix, call, y_BND, linear)
        finally:
            calls.aside = False

    def mix(self, call: AttentionCall, y_BND: Tensor, linear: Linear) -> Tensor:
        """The attention's result with the memory's answer in it."""
        memory, context, reading = self.memory, call.context, call.reading
        if context is not None:
            for place, source in enumerate(self.sources):
                if place not in call.projected:
                    raise ValueError(self.passed_by(source))
            if call.term_BND is not None:
                raise ValueError(self.passed_by(self.first))
            if memory.reads_heads or context.writes or context.traces:
                outputs = (call.projected[place] for place in range(len(self.sources)))
                call.query = self.with_heads(call.query, *self.split(*outputs))
        if reading is None:
            reading = self.read(call.query, context, None)
            if reading.query_BND is not None:
                raise ValueError(undeclared(memory, "a term of the queries", "queries"))
            if context is not None and reading.context is not None:
                raise ValueError(undeclared(memory))
        y_BHNE = y_BND.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        y_BND = memory.project(y_BHNE, call.query, reading, linear, self.projection.weights())
        if context is not None:
            call.reading = reading
            context.attended[self.number] = call
        return y_BND

    def read(self, query: Query, context: SegmentContext | None, project_kv: ProjectKV | None) -> Reading:
        """The memory's answer; a partial segment keeps the opened memory for its next tokens."""
        state: Any = () if context is None else context.states[self.number]
        if context is None or context.opened_layers is None:
            return read_segment(self.memory, state, query, project_kv)
        opened = context.opened_layers[self.number]
        return opened.read(self.memory, state, query, project_kv, context.positions_BLP)  # type: ignore[no-any-return]

    def with_heads(self, query: Query, q_BHNE: Tensor | None, k_BGNE: Tensor, v_BGNE: Tensor) -> Query:
        """The query with keys and values for every head, which groups of heads may share."""
        shared = self.heads // k_BGNE.shape[1]
        k_BHNE, v_BHNE = (t if shared == 1 else t.repeat_interleave(shared, 1) for t in (k_BGNE, v_BGNE))
        return query._replace(q_BHNE=q_BHNE, k_BHNE=k_BHNE, v_BHNE=v_BHNE)

    def check_projected(self, root: nn.Module, args: Any, output: Any) -> None:
        """Refuse (ValueError) a layer's call without its projection; a forward hook of the module that holds both."""
        calls = running()
        if calls.attention is not None and calls.attention.hook is self:
            calls.attention = None
            raise ValueError(self.passed_by(self.projection))

    def leave_block(self, output: Any) -> None:
        """Write the memory, from the block's input and output."""
        context = running().segment
        if context is None:
            return
        call, x_BND = context.attended[self.number], context.inputs[self.number]
        context.attended[self.number] = context.inputs[self.number] = None  # keep no activation alive
        if call is None:
            return
        if x_BND is None:
            raise ValueError(self.passed_by(self.block))
        if not context.writes and context.traces is None:
            return
        y_BND = output[0] if isinstance(output, tuple) else output
        assert call.reading is not None
        trace = Trace(x_BND, y_BND, call.query, call.reading, call.weights_BHWL)
        if context.back_BL is not None:
            trace = trace.in_order(context.back_BL)
        if context.traces is not None:
            context.traces[self.number] = trace
        if context.writes:
            memory, state = self.memory, context.states[self.number]
            written = trace if context.segment is None else trace.narrow(*context.segment)
            context.states_after[self.number], loss = with_weights(memory, memory.write, state, written)
            no_loss(loss, memory)

    def check_written(self, context: SegmentContext) -> None:
        """Raise ValueError if the layer attended and its block did not return through the hook."""
        if context.attended[self.number] is not None:
            context.attended[self.number] = None
            raise ValueError(self.passed_by(self.block))

    def passed_by(self, module: TrackedModule) -> str:
        """Message for a forward that does not call a module it should call."""
        place = f"{type(module.root).__name__}.{module.path}, a {type(module.module).__name__}"
        return (
            f"the memory of {type(self.layer).__name__} had no part in this forward: {place}, was not called as a "
            "module, or its forward was replaced after add_memory; undo what replaced it (a fused kernel, a patched "
            "forward), or call remove_memory(model)"
        )


def query_columns(split: Callable[..., Any], output_BNL: Tensor) -> Tensor:
    """Columns of the queries in the output of a projection that keys and values share."""
    columns_11L = torch.arange(output_BNL.shape[-1], device=output_BNL.device)[None, None]
    return split(columns_11L)[0].flatten()  # type: ignore[no-any-return]


def run_host(context: SegmentContext, hooks: list[MemoryHook], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the own forward of a host's class; its hooks read and write the context."""
    for hook in hooks:
        hook.block.follow()
    if (hooks or context.recurrent) and model.training:
        capture_checkpoints(model)
    with entered(context):
        out = type(model).forward(model, *args, **kwargs)
    for hook in hooks:
        hook.check_written(context)
    return out


def undeclared(memory: nn.Module, what: str = "a context", word: str = "context") -> str:
    """Message for slots that no layer would attend, or a term that none would add."""
    return f"memory {type(memory).__name__} offers {what} and does not say so; add {word!r} to its needs"


def slot_attentions_of(memory: ModelMemory) -> Mapping[str, nn.Module]:
    """The modules that read the memory's slots before blocks (ValueError: the memory's needs do not name the slots)."""
    found = memory._modules.get(SLOT_ATTENTIONS)
    if found is None:
        raise ValueError(undeclared(memory, "slots", "slots_in_front"))
    return found  # type: ignore[return-value]


def cache_name(host: nn.Module) -> str:
    """The keyword of a host's KV cache in its forward and its output: `cache` from transformers 5.24 on."""
    return "cache" if "cache" in inspect.signature(type(host).forward).parameters else "past_key_values"


def rename_cache(given: dict[str, Any], name: str) -> Any:
    """Give the KV cache among the arguments of a call this name, whichever of both it has, and return it."""
    for other in {"cache", "past_key_values"} & {*given} - {name}:
        value = given.pop(other)
        given[name] = value if given.get(name) is None else given[name]
    return given.get(name)


def refuse_misspelt(model: nn.Module, args: Any, given: Iterable[str]) -> None:
    """Raise ValueError for a keyword that looks like ours, which `**kwargs` of a host would swallow; a forward pre-hook
    where no forward of ours is called."""
    for name in given:
        if name.startswith("memory_"):
            raise ValueError(f"{name}: {type(model).__name__} has no such keyword; only a state is given, memory_state")


def install(site: Site, host: Host, memory: LayerMemory) -> None:
    """Give a layer a memory that all rows share."""
    if host.install is not None:
        layer = site.layer
        layer.memory = memory
        host.install(layer, memory)
        layer.uninstall_memory = host.uninstall
        return
    hook = MemoryHook(site, host)
    hook.install(memory)
    for model in {site.model, getattr(site.model, "base_model", site.model)}:
        last = list(inspect.signature(type(model).forward).parameters.values())[-1]
        if last.kind is last.VAR_KEYWORD and refuse_misspelt not in model._forward_pre_hooks.values():
            hook.handles.append(model.register_forward_pre_hook(refuse_misspelt, with_kwargs=True))
    if host.watch is not None:
        module, watch = host.watch
        hook.handles.append(module.register_forward_pre_hook(watch))


def no_loss(loss: Tensor | None, memory: nn.Module) -> None:
    """Raise ValueError for an auxiliary loss that trains something: the host has no place for it."""
    if loss is not None and memory.training and loss.requires_grad:
        raise ValueError(
            f"memory {type(memory).__name__} is trained with an auxiliary loss, which a host model has no place for; "
            "switch it off in the memory's options, or take a model of create_model"
        )


def refuse_forgetting(model: nn.Module) -> None:
    """Raise ValueError if the model trains a memory with images without a state between them."""
    if model.training and torch.is_grad_enabled():
        raise ValueError(
            "memory_state is missing: the memory is written after each image, so that a call without a state would "
            "neither read nor train it; give memory_state=model.init_memory_state(rows) with the first frames, and the "
            "returned state with the next"
        )
