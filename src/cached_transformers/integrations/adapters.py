"""Memory for models that others wrote: `add_memory` and `remove_memory`.

The host's own code runs as it is. What an attention layer receives is noted by a hook, and its output projection is
made to mix the memory in before it projects. What a class of attention layers calls its projection and its heads, an
*adapter* says, in one short function; see `hosts.register_adapter`. `streams.py` gives decoders memories with a state,
`exchange.py` exchanges the attention of the same layers.

Legend: B rows, N tokens, H heads, E head width, D = H * E model width.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from cached_transformers.layers.attention import plain_weights
from cached_transformers.memories import create_memory, memory_spec
from cached_transformers.memories.parts.shared_cache import CacheSlots
from cached_transformers.registry import MEMORIES
from cached_transformers.seam.memory import LayerMemory, Query, Reading
from cached_transformers.state import State

from .hosts import _ADAPTERS, Host, Inner, Site, Stream, register_adapter, sites
from .masks import MASKED, PER_QUERY, map_size, no_mask, padding_of

__all__ = [
    "MASKED",
    "PER_QUERY",
    "_ADAPTERS",
    "Host",
    "Inner",
    "Site",
    "Stream",
    "Tap",
    "add_memory",
    "map_size",
    "no_mask",
    "padding_of",
    "register_adapter",
    "remove_memory",
    "sites",
]


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
            return self._mix(y_BND, query)
        # The memory attends while the layer's forward still runs, and that attention is none of the layer's.
        self.exchange.aside = True
        try:
            return self._mix(y_BND, query)
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

    def remove(self, layer: nn.Module) -> None:
        """Give the layer and its projection their own code back."""
        del self.projection.forward
        for handle in self.handles:
            handle.remove()


def add_memory(model: nn.Module, memory: str | dict[str, Any] = "grc", **options: Any) -> nn.Module:
    """Give every self-attention layer of `model` a memory, in place; weights and host code stay as they are.

    Works with timm's ViT and DeiT, Swin and PVTv2, our PVT, torch.nn.MultiheadAttention and TransformerEncoder, and
    transformers' ViT, BERT, and the encoders of BART, T5 and SwitchTransformers; transformers' GPT-2 and Llama take
    memories with a state (`streams.py`); other classes by `register_adapter`. Train and save as before: the memory's
    parameters and caches live under `<attention layer>.memory` in the state dict. Models of transformers note their
    memory in `config.cached_transformers`, so that `load_pretrained` can restore what `save_pretrained` wrote.

    Args:
        model: the host model.
        memory: name of a memory, or {"name": ..., option: value}.
        options: options of the memory (`ratio`, `length`, `variant`, ...); `input_size`, the (height, width) of
            images, for hosts that do not know it (PVTv2 made for other sizes than its default); `segment_length`, the
            tokens after which a decoder's memory is written, None for one segment a call.

    Returns:
        The same model.

    Raises:
        ValueError: a layer's class has no adapter; the model has a memory already; the memory needs a state that the
            host cannot carry; or the memory's own constraints (ratio, heads).
    """
    spec = memory_spec(memory)
    if spec is None:
        raise ValueError("memory=None adds nothing; name a memory, or take one away by remove_memory(model)")
    name, settings = spec
    more: dict[str, Any] = {key: options.pop(key) for key in ("input_size", "segment_length") if key in options}
    more = {key: value for key, value in more.items() if value is not None}
    MEMORIES.check(name, options)
    settings |= options
    needs: frozenset[str] = getattr(MEMORIES.entry(name).factory, "needs", frozenset())
    if needs & {"state", "tokens_round"}:
        _add_stream(model, name, settings, **more)
    else:
        _add_shared(model, name, settings, **more)
    settle_nested_tensors(model)
    note_memory(model, {"memory": {"name": name, **settings}, **more})
    return model


def _add_stream(
    model: nn.Module,
    name: str,
    settings: dict[str, Any],
    segment_length: int | None = None,
    input_size: tuple[int, int] | None = None,
) -> None:
    """A memory with a state, for a decoder of transformers."""
    # The length is the memory's own business here; no adapter need ask the user for it.
    found = sites(model, {"length": 1, **settings})
    if any(host.stream is None for _, host in found):
        raise ValueError(
            f"memory {name!r} carries a state from call to call, which {type(model).__name__} does not take or return; "
            "shared memories work here: 'grc', 'attention_cache'"
        )
    if input_size is not None:
        raise ValueError(f"input_size={input_size} is for images, which {type(model).__name__} does not read")
    streams = importlib.import_module(".transformers.streams", __package__)
    streams.add_stream_memory(model, found, name, settings, segment_length)


def _add_shared(
    model: nn.Module,
    name: str,
    settings: dict[str, Any],
    segment_length: int | None = None,
    input_size: tuple[int, int] | None = None,
) -> None:
    """A memory that all rows share, in every self-attention layer."""
    found = sites(model, settings | ({"input_size": input_size} if input_size is not None else {}))
    built = []
    for site, host in found:  # build all before touching the model: a refusal leaves it as it was
        if host.refusal is not None:
            raise ValueError(host.refusal)
        if any(child == "memory" for child, _ in site.layer.named_children()):
            where = site.name or type(model).__name__
            raise ValueError(f"{where} has a memory already; call remove_memory(model) first")
        layer = layer_memory(site, host, name, settings)
        built.append((site, host, layer))
    if segment_length is not None:
        raise ValueError(
            f"segment_length={segment_length} is for memories that carry a state from segment to segment, which "
            f"{name!r} is not; leave it out"
        )
    for site, host, layer in built:
        _attach(site.layer, host, layer)


def layer_memory(site: Site, host: Host, name: str, settings: dict[str, Any]) -> LayerMemory:
    """The memory for one layer, on its device, in its dtype and mode.

    Raises:
        ValueError: the memory's own constraints, or more channels than the layer's input has.
    """
    reference = next(site.layer.parameters())
    memory = create_memory({"name": name, **settings}, host.width, host.heads, **host.known)
    assert isinstance(memory, LayerMemory)
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


def _attach(layer: nn.Module, host: Host, memory: LayerMemory) -> None:
    layer.memory = memory
    if host.install is not None:
        host.install(layer, memory)
        layer.memory_detach = host.uninstall  # type: ignore[assignment]
        return
    tap = Tap(memory, host)
    tap.projection.forward = tap.project  # type: ignore[method-assign]
    tap.handles.append(layer.register_forward_pre_hook(tap.before_attention, with_kwargs=True))
    if host.watch is not None:
        module, hook = host.watch
        tap.handles.append(module.register_forward_pre_hook(hook))
    layer.memory_detach = tap.remove  # type: ignore[assignment]


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


def settle_nested_tensors(model: nn.Module) -> None:
    """TransformerEncoder's shortcut for padded inputs hands its layers nested tensors, which neither a memory nor a
    core can read: it is off as long as a layer has one."""
    for module in model.modules():
        if not isinstance(module, nn.TransformerEncoder):
            continue
        ours = any({"memory_detach", "exchange"} & vars(layer).keys() for layer in module.modules())
        if ours and "nested_before" not in vars(module):
            module.nested_before = module.use_nested_tensor  # type: ignore[assignment]
            module.use_nested_tensor = False
        elif not ours and "nested_before" in vars(module):
            module.use_nested_tensor = vars(module).pop("nested_before")
