"""Build the memories of a host model: one for each layer, or one that spans the layers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers.interfaces.memory import LayerMemory, Memory, ModelMemory
from cached_transformers.linear_maps import first_columns
from cached_transformers.memories import create_memory
from cached_transformers.memories.grc.grc import CacheGates
from cached_transformers.memories.grc.shared_cache import SharedCache
from cached_transformers.registry import MEMORIES

from .hosts import Host, Site, refuse_memory
from .memory_hooks import SLOT_ATTENTIONS, query_columns

SINKS = 4
"""First tokens of a text that stores keep in a decoder: pretrained ones break without them."""


def spans_layers(name: str) -> bool:
    """Return True for a registered memory that is one for all layers, not one for each."""
    factory = MEMORIES.entry(name).factory
    return isinstance(factory, type) and issubclass(factory, ModelMemory)


def refuse_second(model: nn.Module, *modules: nn.Module) -> None:
    """Raise ValueError if one of the modules has a memory already."""
    if any("uninstall_memory" in vars(module) for module in (model, *modules)):
        raise ValueError(f"{type(model).__name__} has a memory already; call remove_memory(model) first")


def build_memories(
    model: nn.Module, body: nn.Module, found: list[tuple[Site, Host]], name: str, settings: dict[str, Any]
) -> tuple[ModelMemory | None, list[LayerMemory]]:
    """The memories of a model with a state: one that spans the layers, if `name` does, and those of its layers.

    Args:
        body: the module that has the layers. found: the layers.

    Raises:
        ValueError: the memory needs something that the model does not offer, or its own constraints.
    """
    spanning = _spanning(body, found, name, settings) if spans_layers(name) else None
    layers = []
    for index, (site, host) in enumerate(found):
        if spanning is not None:
            layers.append(_settled(spanning.layer_memory(index), site, host))
            continue
        # The number of slots of a shared cache means nothing to a memory with a state.
        facts = {name: fact for name, fact in host.facts.items() if name not in ("length", "size", "prefix")}
        facts = {"index": index, "depth": len(found), **facts}
        if host.stream is not None and host.stream.causal and not settings.get("same_length"):
            facts["sinks"] = SINKS
        layers.append(layer_memory(site, replace(host, facts=facts), name, settings))
    refuse_memory(name, model, [host for _, host in found], layers, spanning)
    return spanning, layers


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
        layer = f"{type(site.layer).__name__} has inputs of {host.channels} channels and merged heads of {host.width}"
        if {"context", "head"} <= memory.needs:
            raise ValueError(f"{layer}; memory {name!r} needs as many of both; take one that stores only inputs")
        if any(module.width > host.channels for module in slots):
            ratio = f"{host.channels / host.width:g}"
            raise ValueError(f"{layer}; a cache of {slots[0].width} channels needs more; take ratio={ratio} or less")
        if getattr(memory, "mix", "heads") == "outputs":
            raise ValueError(f"{layer}; mix='outputs' (variant='released') needs as many of both, take mix='heads'")
    memory = _settled(memory, site, host)
    start: Any = getattr(memory, "start_from", None)
    offered = start is not None and memory.needs <= host.offers  # otherwise it is refused later
    if offered and host.stream is not None and host.projection is not None:
        start(partial(_query_columns, host), partial(first_columns, host.projection, host.width))
    return memory


def _query_columns(host: Host, count: int) -> Tensor:
    """(H * E, C): first columns of the layer's map of queries."""
    assert host.stream is not None
    weight_LC = first_columns(host.stream.sources[0][0], host.channels or host.width, count)
    return weight_LC if len(weight_LC) == host.width else weight_LC[query_columns(host.stream.split, weight_LC.mT)]


def give_key_shape(memory: nn.Module, host: Host) -> None:
    """Tell a memory, and those that it holds, about the layer's heads of keys."""
    for module in memory.modules():
        if isinstance(module, Memory):
            module.key_shape = host.key_shape


def _settled(memory: LayerMemory, site: Site, host: Host) -> LayerMemory:
    """The memory on the layer's device, in its mode and dtype; in the model's where the layer's weights are packed."""
    give_key_shape(memory, host)
    both = [*site.layer.parameters(), *site.model.parameters(), torch.empty(0)]
    dtype = next(p.dtype for p in both if p.is_floating_point())
    return memory.to(both[0].device, dtype).train(site.layer.training)


def _spanning(body: Any, found: list[tuple[Site, Host]], name: str, settings: dict[str, Any]) -> ModelMemory:
    """The memory that spans the layers, on the model's device, in its dtype and mode.

    Raises:
        ValueError: it needs slots to be read before blocks, and its `slot_attention` makes none that is.
    """
    like, host = next(body.parameters()), found[0][1]
    assert host.stream is not None
    # The host's output went through its final norm, a layer's output did not.
    norm = "pre" if "layer_traces" in getattr(MEMORIES.entry(name).factory, "needs", ()) else "post"
    facts = {"causal": host.stream.causal, "norm": norm, "depth": host.facts.get("depth", len(found))}
    facts["relative"] = host.facts.get("relative")
    memory = create_memory({"name": name, **settings}, host.channels or host.width, host.heads, **facts)
    assert isinstance(memory, ModelMemory)
    give_key_shape(memory, host)
    if "slots_in_front" in memory.needs:
        made = {str(index): memory.slot_attention(index) for index in range(len(found))}
        readers = {index: module for index, module in made.items() if module is not None}
        after = [type(module).__name__ for module in readers.values() if not getattr(module, "in_front", False)]
        if after or not readers:
            why = f"of {after[0]}, which does not say in_front=True" if after else "and its slot_attention gives none"
            raise ValueError(f"memory {type(memory).__name__} needs slots to be read before blocks, {why}")
        setattr(memory, SLOT_ATTENTIONS, nn.ModuleDict(readers))
    return memory.to(like.device, like.dtype).train(body.training)
