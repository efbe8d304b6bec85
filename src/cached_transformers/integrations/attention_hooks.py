"""How a memory gets into one attention layer of a model that somebody else wrote.

What the layer receives is noted by a hook, and its output projection is made to mix the memory in before it projects.

Legend: B rows, N tokens, H heads, E head width, D = H * E model width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cached_transformers.interfaces.incremental import read_segment
from cached_transformers.interfaces.memory import LayerMemory, Linear, ModelMemory, Query, Reading
from cached_transformers.memories import create_memory
from cached_transformers.memories.grc.grc import CacheGates
from cached_transformers.memories.grc.shared_cache import SharedCache
from cached_transformers.registry import MEMORIES
from cached_transformers.state import State

from .hosts import Host, Site
from .memory_lookup import memory_of, refuse_frozen
from .offload import with_weights
from .tracked_modules import Spot, StandIn, root_of


class Tap:
    """Lets a memory into one attention layer. Holds the layer's input from its call to that of its projection.

    The memory is the one that the layer has when it is called, and acts on what then stands in the projection's place:
    an adapter round the projection sees the heads with the memory mixed in, and can be merged.
    """

    def __init__(self, site: Site, host: Host) -> None:
        assert host.projection is not None
        self.layer, self.heads, self.make_query = site.layer, host.heads, host.query
        self.projection = StandIn(*root_of(site, host.projection), self.project)
        self.spots: list[Spot] = [self.projection]
        self.query: Query | None = None
        self.exchange: Any = None
        self.handles: list[RemovableHandle] = []

    @property
    def memory(self) -> LayerMemory:
        """The layer's memory as it is now."""
        found = memory_of(self.layer)
        assert isinstance(found, LayerMemory)
        return found

    def before_attention(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.begin(self.make_query(*args, **kwargs))

    def begin(self, query: Query) -> None:
        """The layer is called, and its projection will be."""
        refuse_frozen(self.memory)
        for spot in self.spots:
            spot.follow()
        self.query = query
        self.exchange = vars(self.layer).get("exchange")

    def project(self, y_BND: Tensor, **options: Any) -> Tensor:
        """Stands in the place of the projection's forward; `y_BND` are the merged heads, `options` an adapter's."""
        linear = partial(self.projection.original, **options)
        if self.query is None:  # it is not the layer that calls
            return linear(y_BND)
        query, self.query = self.query, None  # keep no activation alive
        if self.exchange is None:
            return with_weights(self.memory, self._mix, y_BND, query, linear)
        # The memory attends while the layer's forward still runs, and that attention is none of the layer's.
        self.exchange.aside = True
        try:
            return with_weights(self.memory, self._mix, y_BND, query, linear)
        finally:
            self.exchange.aside = False

    def _mix(self, y_BND: Tensor, query: Query, linear: Linear) -> Tensor:
        return self._through((), y_BND, query, linear)[0]

    def _through(
        self, state: State, y_BND: Tensor, query: Query, linear: Linear, reading: Reading | None = None
    ) -> tuple[Tensor, Reading]:
        """The attention's result, and what was read for it, here or before."""
        reading = read_segment(self.memory, state, query, None) if reading is None else reading
        y_BHNE = y_BND.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return self.memory.project(y_BHNE, query, reading, linear, self.projection.weights()), reading

    def acted(self, root: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the innermost module that holds layer and projection.

        Raises:
            ValueError: the layer was called, and its projection was not, or not by the memory's way.
        """
        if self.query is not None:
            self.query = None
            raise ValueError(self.passed_by(self.projection))

    def passed_by(self, spot: Spot) -> str:
        """Message for a forward that calls no module where one should be called."""
        place = f"{type(spot.root).__name__}.{spot.path}, a {type(spot.module).__name__}"
        return (
            f"the memory of {type(self.layer).__name__} had no part in this forward: {place}, was not called as a "
            "module, or its forward was replaced after add_memory; undo what replaced it (a fused kernel, a patched "
            "forward), or call remove_memory(model)"
        )

    def attach(self, memory: LayerMemory, before: Callable[..., Any]) -> None:
        """Put the memory into the layer, whose calls `before` is to see."""
        self.layer.memory = memory
        for spot in self.spots:
            spot.follow()
        self.handles.append(self.layer.register_forward_pre_hook(before, with_kwargs=True))
        self.handles.append(self.projection.root.register_forward_hook(self.acted))
        self.layer.memory_detach = self.remove

    def remove(self, layer: nn.Module) -> None:
        """Give the layer and its projection their own code back."""
        for spot in self.spots:
            spot.leave()
        for handle in self.handles:
            handle.remove()


def spans_layers(name: str) -> bool:
    """Whether a registered memory is one for all layers, and not one for each."""
    factory = MEMORIES.entry(name).factory
    return isinstance(factory, type) and issubclass(factory, ModelMemory)


def layer_memory(site: Site, host: Host, name: str, settings: dict[str, Any]) -> LayerMemory:
    """The memory for one layer, on its device, in its dtype and mode.

    Raises:
        ValueError: the memory's own constraints, or more channels than the layer's input has.
    """
    facts = {fact: value for fact, value in host.facts.items() if fact != "length" or value}
    if host.channels is not None:
        facts["channels"] = host.channels
    stores = "context" in getattr(MEMORIES.entry(name).factory, "needs", ())  # inputs of the layer
    width = host.channels if stores and host.channels is not None else host.width
    memory = create_memory({"name": name, **settings}, width, host.heads, **facts)
    if not isinstance(memory, LayerMemory):
        raise ValueError(f"memory {name!r} spans the layers, which only its class can tell; register the class itself")
    if host.channels is not None and host.channels != host.width:
        slots = [module for module in memory.modules() if isinstance(module, SharedCache | CacheGates)]
        layer = f"{type(site.layer).__name__} has inputs of {host.channels} channels and heads of {host.width} together"
        if {"context", "head"} <= memory.needs:
            raise ValueError(f"{layer}; memory {name!r} needs as many of both, take one of a layer's inputs alone")
        if any(module.width > host.channels for module in slots):
            raise ValueError(
                f"{layer}, of which a cache of {slots[0].width} takes more than there are; take ratio="
                f"{host.channels / host.width:g} or less"
            )
        if getattr(memory, "mix", "heads") == "outputs":
            raise ValueError(f"{layer}; mix='outputs' (variant='released') needs as many of both, take mix='heads'")
    return settled(memory, site)


def settled(memory: LayerMemory, site: Site) -> LayerMemory:
    """The memory on the layer's device, in its mode and dtype; in the model's where the layer's weights are packed."""
    both = [*site.layer.parameters(), *site.model.parameters(), torch.empty(0)]
    dtype = next(p.dtype for p in both if p.is_floating_point())
    return memory.to(both[0].device, dtype).train(site.layer.training)


def attach(site: Site, host: Host, memory: LayerMemory) -> None:
    """Give a layer a memory that all rows share."""
    if host.install is not None:
        layer = site.layer
        layer.memory = memory
        host.install(layer, memory)
        layer.memory_detach = host.uninstall
        return
    tap = Tap(site, host)
    tap.attach(memory, tap.before_attention)
    if host.watch is not None:
        module, hook = host.watch
        tap.handles.append(module.register_forward_pre_hook(hook))


def no_loss(loss: Tensor | None, memory: nn.Module) -> None:
    """Refuse an auxiliary loss, which would be lost.

    Raises:
        ValueError: there is one that trains something.
    """
    if loss is not None and memory.training and loss.requires_grad:
        raise ValueError(
            f"memory {type(memory).__name__} is trained with a loss of its own, for which a model that others wrote "
            "has no place; switch it off in the memory's options, or take a model of create_model"
        )


def refuse_forgetting(model: nn.Module) -> None:
    """Refuse to train a memory with images between which nobody carries its state.

    Raises:
        ValueError: the model trains.
    """
    if model.training and torch.is_grad_enabled():
        raise ValueError(
            "memory_state is missing: the memory is written behind each image, so that a call without a state would "
            "never read what it wrote, nor train it; give memory_state=model.init_memory_state(rows) with the first "
            "frames, and what comes back with the next"
        )
