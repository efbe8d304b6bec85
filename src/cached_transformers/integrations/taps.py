"""How a memory gets into one attention layer of a model that somebody else wrote.

What the layer receives is noted by a hook, and its output projection is made to mix the memory in before it projects.

Legend: B rows, N tokens, H heads, E head width, D = H * E model width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cached_transformers.layers.attention import plain_weights
from cached_transformers.memories import create_memory
from cached_transformers.memories.parts.shared_cache import CacheSlots
from cached_transformers.registry import MEMORIES
from cached_transformers.seam.memory import LayerMemory, ModelMemory, Query, Reading
from cached_transformers.state import State

from .at_hand import with_weights
from .hosts import Host, Site


class Tap:
    """Lets a memory into one attention layer. Holds the layer's input from its call to that of its projection."""

    def __init__(self, memory: LayerMemory, host: Host) -> None:
        assert host.projection is not None
        self.memory, self.projection, self.heads, self.make_query = memory, host.projection, host.heads, host.query
        self.query: Query | None = None
        self.exchange: Any = None
        self.handles: list[RemovableHandle] = []

    def before_attention(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.query = self.make_query(*args, **kwargs)
        self.exchange = vars(layer).get("exchange")

    def project(self, y_BND: Tensor) -> Tensor:
        """Stands in the place of the projection's forward; `y_BND` are the merged heads."""
        assert self.query is not None
        query, self.query = self.query, None  # keep no activation alive
        if self.exchange is None:
            return with_weights(self.memory, self._mix, y_BND, query)
        # The memory attends while the layer's forward still runs, and that attention is none of the layer's.
        self.exchange.aside = True
        try:
            return with_weights(self.memory, self._mix, y_BND, query)
        finally:
            self.exchange.aside = False

    def _mix(self, y_BND: Tensor, query: Query) -> Tensor:
        return self._through((), y_BND, query)[0]

    def _through(self, state: State, y_BND: Tensor, query: Query) -> tuple[Tensor, Reading]:
        """The attention's result, and what was read for it."""
        reading = self.memory.read(state, query, None)
        y_BHNE = y_BND.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        linear = partial(type(self.projection).forward, self.projection)
        return self.memory.project(y_BHNE, query, reading, linear, plain_weights(self.projection)), reading

    def attach(self, layer: nn.Module, before: Callable[..., Any]) -> None:
        """Put the memory into the layer, whose calls `before` is to see."""
        layer.memory = self.memory
        self.projection.forward = self.project  # type: ignore[method-assign]
        self.handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
        layer.memory_detach = self.remove  # type: ignore[assignment]

    def remove(self, layer: nn.Module) -> None:
        """Give the layer and its projection their own code back."""
        del self.projection.forward
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
    reference = next(site.layer.parameters())
    memory = create_memory({"name": name, **settings}, host.width, host.heads, **facts)
    if not isinstance(memory, LayerMemory):
        raise ValueError(f"memory {name!r} spans the layers, which only its class can tell; register the class itself")
    if host.channels is not None and host.channels != host.width:
        slots = [module for module in memory.modules() if isinstance(module, CacheSlots)]
        layer = f"{type(site.layer).__name__} has inputs of {host.channels} channels and heads of {host.width} together"
        if any(module.width > host.channels for module in slots):
            raise ValueError(
                f"{layer}, of which a cache of {slots[0].width} takes more than there are; take ratio="
                f"{host.channels / host.width:g} or less"
            )
        if getattr(memory, "mix", "heads") == "outputs":
            raise ValueError(f"{layer}; mix='outputs' (variant='released') needs as many of both, take mix='heads'")
    return memory.to(reference.device, reference.dtype).train(site.layer.training)


def attach(layer: nn.Module, host: Host, memory: LayerMemory) -> None:
    """Give a layer a memory that all rows share."""
    if host.install is not None:
        layer.memory = memory
        host.install(layer, memory)
        layer.memory_detach = host.uninstall  # type: ignore[assignment]
        return
    tap = Tap(memory, host)
    tap.attach(layer, tap.before_attention)
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
