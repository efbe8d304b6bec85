"""Memory for models that others wrote: `add_memory` and `remove_memory`.

The host's own code runs as it is: `taps.py` lets a memory into a layer, `transformers/streams.py` gives decoders
memories with a state. What a class of attention layers calls its projection and its heads, and what it offers a
memory, an *adapter* says, in one short function; see `hosts.register_adapter`. `exchange.py` exchanges the attention of
the same layers.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from cached_transformers.memories import MemorySpec, create_memory, memory_spec
from cached_transformers.registry import MEMORIES
from cached_transformers.seam.memory import ModelMemory

from .hosts import Host, HostAttention, Site, Stream, refuse_memory, register_adapter, sites
from .taps import attach, layer_memory, spans_layers
from .torch_nn import settle_nested_tensors

__all__ = [
    "Host",
    "HostAttention",
    "Site",
    "Stream",
    "add_memory",
    "register_adapter",
    "remove_memory",
    "sites",
]


def add_memory(model: nn.Module, memory: MemorySpec = "grc", **options: Any) -> nn.Module:
    """Give every self-attention layer of `model` a memory, in place; weights and host code stay as they are.

    Works with the models of timm and transformers that docs/support.md lists, our PVT, torch.nn.MultiheadAttention and
    TransformerEncoder; transformers' decoders take memories with a state (`transformers/streams.py`); other classes by
    `register_adapter`. What a memory needs and what
    the host offers (`seam/fit.py`) decides which memories fit, your own among them. Train and save as before: the
    memory's parameters and caches live under `<attention layer>.memory` in the state dict. Models of transformers note
    their memory in `config.cached_transformers`, so that `load_pretrained` can restore what `save_pretrained` wrote.

    Args:
        model: the host model.
        memory: name of a memory, or {"name": ..., option: value}.
        options: options of the memory (`ratio`, `length`, `variant`, ...); `input_size`, the (height, width) of
            images, for hosts that do not know it (PVTv2 made for other sizes than its default); `segment_length`, the
            tokens after which a decoder's memory is written, None for one segment a call.

    Returns:
        The same model.

    Raises:
        ValueError: a layer's class has no adapter; the model has a memory already; the memory needs what the host does
            not offer (a state, a look at later tokens); or the memory's own constraints (ratio, heads).
    """
    spec = memory_spec(memory)
    if spec is None:
        raise ValueError("memory=None adds nothing; name a memory, or take one away by remove_memory(model)")
    name, settings = spec
    more: dict[str, Any] = {key: options.pop(key) for key in ("input_size", "segment_length") if key in options}
    more = {key: value for key, value in more.items() if value is not None}
    MEMORIES.check(name, options)
    settings |= options
    sizes = {"input_size": more["input_size"]} if "input_size" in more else {}
    entry = MEMORIES.entry(name)
    slots = "length" in entry.options and "whole_segment" in getattr(entry.factory, "needs", ())
    found = sites(model, settings | sizes, slots=slots)
    refusal = next((host.refusal for _, host in found if host.refusal is not None), None)
    if refusal is not None:
        raise ValueError(refusal)
    streams = [host.stream for _, host in found]
    if streams[0] is not None and None not in streams:
        streams[0].add(model, found, name, settings, **more)
    else:
        _add_shared(model, found, name, settings, **more)
    settle_nested_tensors(model)
    note_memory(model, {"memory": {"name": name, **settings}, **more})
    return model


def _add_shared(
    model: nn.Module,
    found: list[tuple[Site, Host]],
    name: str,
    settings: dict[str, Any],
    segment_length: int | None = None,
    input_size: tuple[int, int] | None = None,
) -> None:
    """A memory that all rows share, in every self-attention layer."""
    hosts, layers = [host for _, host in found], []
    if spans_layers(name):
        spanning = create_memory({"name": name, **settings}, hosts[0].width, hosts[0].heads)
        assert isinstance(spanning, ModelMemory)
        refuse_memory(name, model, hosts, [spanning.layer_memory(index) for index in range(len(hosts))], spanning)
    for site, host in found:  # build all before touching the model: a refusal leaves it as it was
        if any(child == "memory" for child, _ in site.layer.named_children()):
            where = site.name or type(model).__name__
            raise ValueError(f"{where} has a memory already; call remove_memory(model) first")
        layers.append(layer_memory(site, host, name, settings))
    refuse_memory(name, model, hosts, layers)
    if segment_length is not None:
        raise ValueError(
            f"segment_length={segment_length} is for memories that carry a state from segment to segment, which "
            f"{name!r} is not; leave it out"
        )
    for (site, host), layer in zip(found, layers, strict=True):
        attach(site.layer, host, layer)


def remove_memory(model: nn.Module) -> nn.Module:
    """Undo `add_memory`, in place: the host computes exactly what it computed before. Returns the model.

    Raises:
        ValueError: the model has no memory.
    """
    layers = [m for m in model.modules() if "memory_detach" in vars(m)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no memory that could be removed")
    for layer in layers:
        detach = vars(layer).pop("memory_detach")
        if "memory" in layer._modules:
            del layer.memory
        detach(layer)
    settle_nested_tensors(model)
    note_memory(model, None)
    return model


def note_memory(model: nn.Module, record: dict[str, Any] | None) -> None:
    """Write into the config of a model of transformers what `add_memory` was told; None takes it out again."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return
    if record is not None:
        config.cached_transformers = record
    elif "cached_transformers" in vars(config):
        del config.cached_transformers
