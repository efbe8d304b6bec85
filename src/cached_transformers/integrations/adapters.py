"""Add memory to host models: `add_memory` and `remove_memory`.

The host's own code runs as it is: `memory_hooks.py` lets a memory into a layer, `transformers/add_stateful_memory.py`
and `timm/frames.py` give models memories with a state. An *adapter*, one short function, describes a class of attention
layers: its projection, its heads, and its offers to a memory; see `hosts.register_adapter`.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from cached_transformers.interfaces.memory import ModelMemory
from cached_transformers.memories import MemorySpec, create_memory, memory_spec
from cached_transformers.registry import MEMORIES

from .build_memories import layer_memory, spans_layers
from .hosts import Host, HostAttention, Site, Stream, refuse_memory, register_adapter, sites
from .hub import note_memory
from .memory_hooks import install
from .memory_lookup import mark_fresh
from .peft_models import give_to_adapters, host_of, inside_of, take_from_adapters
from .torch_nn import settle_nested_tensors

__all__ = ["Host", "HostAttention", "Site", "Stream", "add_memory", "register_adapter", "remove_memory", "sites"]


Model = TypeVar("Model", bound=nn.Module)


def add_memory(model: Model, memory: MemorySpec = "grc", **options: Any) -> Model:
    """Give every self-attention layer of `model` a memory, in place; weights and host code remain as they are.

    Works with the models of timm and transformers that docs/support.md lists, this package's PVT,
    torch.nn.MultiheadAttention and TransformerEncoder; other classes by `register_adapter`. transformers' decoders and
    encoders and timm's ViT take memories with a state, which goes in as `memory_state` and comes back. Every memory
    fits whose needs the host offers (`interfaces/capabilities.py`), your own included. Train and save as before: the
    memory's parameters and caches are under `<attention layer>.memory` in the state dict. Models of transformers note
    their memory in `config.cached_transformers`, so that `load_pretrained` can load the files of `save_pretrained`.

    Args:
        model: the host model; or a PeftModel around it, whose adapters then train and save the memory, too.
        memory: name of a memory, or {"name": ..., option: value}.
        options: options of the memory (`ratio`, `length`, `variant`, ...); `input_size`, the (height, width) of
            images, for hosts that do not know it (PVTv2 made for other sizes than its default); `segment_length`, the
            tokens after which a memory with a state is written, required in models of texts; None for one segment a
            call, whose `memory_state` the caller carries to the next. An encoder's segments all begin with the row's
            first token, whose output is that of the last segment. An image is a segment.

    Returns:
        The same model.

    Raises:
        ValueError: a layer's class has no adapter; the model has a memory already; the host does not offer a need of
            the memory (a state, later tokens); `segment_length` is missing; or the memory's own constraints (ratio,
            heads).
    """
    spec = memory_spec(memory)
    if spec is None:
        raise ValueError("memory=None adds nothing; name a memory, or remove one by remove_memory(model)")
    name, settings = spec
    sizes: dict[str, Any] = {key: options.pop(key) for key in ("input_size", "segment_length") if key in options}
    options = MEMORIES.with_preset(name, options)
    MEMORIES.check(name, options)
    settings |= options
    entry = MEMORIES.entry(name)
    needs = getattr(entry.factory, "needs", ())
    given = {key: value for key, value in sizes.items() if key == "input_size" and value is not None}
    host = host_of(model)
    found = sites(host, settings | given, slots="length" in entry.options and "bidirectional" in needs)
    streams = [described.stream for _, described in found]
    by_row = spans_layers(name) or "state" in needs
    if streams[0] is not None and None not in streams and (by_row or streams[0].causal):
        if len({(stream.add, stream.causal, stream.cuts) for stream in streams if stream is not None}) > 1:
            raise ValueError(
                f"{type(host).__name__} holds models that read differently, each with a state of its own; give "
                "add_memory one of them"
            )
        if given:
            raise ValueError(f"input_size={given['input_size']}: {type(host).__name__} needs none; leave it out")
        sizes.pop("input_size", None)
        streams[0].add(host, found, name, settings, **sizes)
    else:
        sizes = {key: value for key, value in sizes.items() if value is not None}
        _add_shared(host, found, name, settings, sizes.get("segment_length"))
    mark_fresh(host)
    settle_nested_tensors(host)
    note_memory(host, {"memory": {"name": name, **settings}, **sizes})
    if host is not model:
        give_to_adapters(model, host)
    return model


def _add_shared(
    model: nn.Module, found: list[tuple[Site, Host]], name: str, settings: dict[str, Any], segment_length: int | None
) -> None:
    """A memory that all rows share, in every self-attention layer."""
    hosts, layers = [host for _, host in found], []
    if spans_layers(name):
        spanning = create_memory({"name": name, **settings}, hosts[0].width, hosts[0].heads)
        assert isinstance(spanning, ModelMemory)
        refuse_memory(name, model, hosts, [spanning.layer_memory(index) for index in range(len(hosts))], spanning)
    for site, host in found:  # build all before the model changes: an error leaves it as it was
        if any(child == "memory" for child, _ in site.layer.named_children()):
            where = site.name or type(model).__name__
            raise ValueError(f"{where} has a memory already; call remove_memory(model) first")
        layers.append(layer_memory(site, host, name, settings))
    refuse_memory(name, model, hosts, layers)
    if segment_length is not None:
        raise ValueError(
            f"segment_length={segment_length} is for memories that carry a state from segment to segment, {name!r} "
            "carries none; leave it out"
        )
    for (site, host), layer in zip(found, layers, strict=True):
        install(site, host, layer)


def remove_memory(model: Model) -> Model:
    """Undo `add_memory`, in place: the host computes exactly the same as before. Returns the model.

    Raises:
        ValueError: the model has no memory.
    """
    layers = [m for m in model.modules() if "uninstall_memory" in vars(m)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no memory that could be removed")
    for layer in layers:
        detach = vars(layer).pop("uninstall_memory")
        if "memory" in layer._modules:
            del layer.memory
        detach(layer)
    settle_nested_tensors(model)
    take_from_adapters(model)
    note_memory(inside_of(model), None)
    return model
