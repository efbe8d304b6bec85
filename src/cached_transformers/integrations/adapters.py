"""Memory for models that others wrote: `add_memory` and `remove_memory`.

The host's own code runs as it is. What an attention layer receives is noted by a hook, and its output projection is
made to mix the memory in before it projects. What a class of attention layers calls its projection and its heads, an
*adapter* says, in one short function; see `register_adapter`. `exchange.py` exchanges the attention of the same layers.

Legend: B rows, N tokens, H heads, E head width, D = H * E model width.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..checks import insist
from ..layers.attention import plain_weights
from ..memories import create_memory, memory_spec
from ..memories.base import LayerMemory, Query, Reading
from ..memories.shared_cache import CacheSlots
from ..registry import MEMORIES
from ..state import State


@dataclass
class Inner:
    """What a layer's softmax attention is like, for those who exchange it.

    Attributes:
        dropout: on the weights. causal: no token sees a later one.
        bias: something is always added to the logits. cross: there are fewer keys than queries.
        padding: the mask that the layer gives its attention hides keys from all queries alike.
        switches: attributes of the layer, with the values under which it calls `scaled_dot_product_attention`.
        install: for layers that never call it; makes room for a core by other means. uninstall: undoes that.
        refusal: why the attention cannot be exchanged.
    """

    dropout: float = 0.0
    causal: bool = False
    bias: bool = False
    cross: bool = False
    padding: bool = False
    switches: dict[str, Any] = field(default_factory=dict)
    install: Callable[[nn.Module], None] | None = None
    uninstall: Callable[[nn.Module], None] | None = None
    refusal: str | None = None


@dataclass
class Stream:
    """What a memory with a state needs to know of a causal layer. The model must pass keywords on to its layers.

    Attributes:
        sources: modules whose outputs, in this order, `split` turns into queries, keys and values (B, H, N, E) without
            positions.
        longest: tokens that the model has positions for; None where there is no such number.
        refusal: why the layer takes no memory with a state.
    """

    sources: tuple[nn.Module, ...]
    split: Callable[..., tuple[Tensor, Tensor, Tensor]]
    longest: int | None = None
    refusal: str | None = None


@dataclass
class Host:
    """How a memory meets one attention layer of somebody else's model.

    Attributes:
        width: D. heads: H.
        projection: the output projection, whose input are the merged heads (B, N, D); None when `install` handles all.
        query: gives the memory's `Query` from the layer's arguments.
        known: facts that a memory may ask for: length, size, prefix, window, reduction.
        install: for layers that never call their projection as a module; attaches the memory by other means.
        uninstall: undoes `install`.
        inner: the layer's own attention.
        refusal: why the layer takes no shared memory.
        watch: a module of the model, and a forward pre-hook of it that tells `query` what it needs.
        channels: of the layer's input, where they are not D.
        stream: of a causal layer that can have a memory with a state.
    """

    width: int
    heads: int
    projection: nn.Module | None
    query: Callable[..., Query]
    known: dict[str, Any] = field(default_factory=dict)
    install: Callable[[nn.Module, LayerMemory], None] | None = None
    uninstall: Callable[[nn.Module], None] | None = None
    inner: Inner = field(default_factory=Inner)
    refusal: str | None = None
    watch: tuple[nn.Module, Callable[..., None]] | None = None
    channels: int | None = None
    stream: Stream | None = None


class Site:
    """Where an adapter stands: the layer, its name, the whole model, and the user's settings for all layers.

    Attributes:
        memory: whether it is a memory that is asked for; else another attention.
    """

    def __init__(
        self, model: nn.Module, name: str, layer: nn.Module, settings: dict[str, Any], memory: bool = True
    ) -> None:
        self.model, self.name, self.settings, self.memory = model, name, settings, memory
        self.layer: Any = layer  # of a class that only its adapter knows

    def parent(self, levels: int = 1) -> nn.Module:
        """The module that holds the layer, or the one further up."""
        return self.model.get_submodule(self.name.rsplit(".", levels)[0] if self.name.count(".") >= levels else "")

    def around(self, attribute: str) -> nn.Module:
        """The nearest module round the layer that has the attribute; the whole model where none has."""
        parts = self.name.split(".")
        for end in reversed(range(len(parts))):
            module = self.model.get_submodule(".".join(parts[:end]))
            if hasattr(module, attribute):
                return module
        return self.model

    def length(self, longest: int = 0) -> int:
        """The `length` that the user set, for hosts that cannot know it. An attention may do without: it then gets
        the `longest` that the host can take, 0 where that is not known either.

        Raises:
            ValueError: it is not set, and a memory needs it.
        """
        if "length" not in self.settings:
            if not self.memory:
                return longest
            raise ValueError(
                f"{type(self.layer).__name__} does not tell how many tokens it will see; "
                "pass the number of cache slots, e.g. add_memory(model, 'grc', length=64)"
            )
        return int(self.settings["length"])


Adapter = Callable[[Site], Host | None]
_ADAPTERS: dict[str, Adapter] = {}


def register_adapter(*classes: str) -> Callable[[Adapter], Adapter]:
    """Decorator: the function describes attention layers of these classes (full dotted names, so that nothing is
    imported).

    The function returns None for a layer that is to be left as it is (a cross-attention).

    Example:
        >>> @register_adapter("my_package.model.MyAttention")
        ... def my_attention(site):
        ...     layer = site.layer
        ...     return Host(layer.dim, layer.heads, layer.out, lambda x: Query(x), known={"length": site.length()})
    """

    def add(adapter: Adapter) -> Adapter:
        for name in classes:
            _ADAPTERS[name] = adapter
        return adapter

    return add


def _adapter(layer: nn.Module) -> Adapter | None:
    for kind in type(layer).__mro__:
        found = _ADAPTERS.get(f"{kind.__module__}.{kind.__qualname__}")
        if found is not None:
            return found
    return None


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
        y_BND = self.memory.project(y_BHNE, query, reading, linear, plain_weights(self.projection))
        return self.memory.finish(y_BND, query, reading), reading

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
    more = {key: options.pop(key) for key in ("input_size", "segment_length") if key in options}
    more = {key: value for key, value in more.items() if value is not None}
    MEMORIES.check(name, options)
    settings |= options
    factory = MEMORIES.entry(name).factory
    if not getattr(factory, "shared", False) and getattr(factory, "insertion", "none") != "none":
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
    streams = importlib.import_module(".streams", __package__)
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


def sites(model: nn.Module, settings: dict[str, Any], memory: bool = True) -> list[tuple[Site, Host]]:
    """Each self-attention layer, with its host description; refuses attention classes without an adapter."""
    for module in ("torch_nn", "timm", "transformers", "transformers_encoders", "transformers_decoders"):
        importlib.import_module(f".{module}", __package__)
    found: list[tuple[Site, Host]] = []
    known: list[str] = []
    strangers: list[tuple[str, nn.Module]] = []
    for name, layer in model.named_modules():
        if any(not k or name == k or name.startswith(k + ".") for k in known):
            continue
        adapter = _adapter(layer)
        if adapter is not None:
            known.append(name)
            site = Site(model, name, layer, settings, memory)
            host = adapter(site)
            if host is not None:
                found.append((site, host))
        elif isinstance(layer, LayerMemory):
            continue  # a memory that is there already is no attention of the host's, whatever its name
        elif "attention" in type(layer).__name__.lower() or type(layer).__name__.endswith("Attn"):
            strangers.append((name, layer))
    strangers = [(n, m) for n, m in strangers if not any(k.startswith(n + ".") for k in known)]
    if strangers or not found:
        classes = sorted({f"{type(m).__module__}.{type(m).__qualname__}" for _, m in strangers})
        what = f"no adapter for attention class {', '.join(classes)}" if classes else "no attention layer found"
        raise ValueError(
            f"{type(model).__name__}: {what}; describe the class with "
            "cached_transformers.register_adapter (known: " + ", ".join(sorted(_ADAPTERS)) + ")"
        )
    return found


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
    config = getattr(model, "config", None)
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


def map_size(tokens: int, prefix: int, grid: tuple[int, int]) -> tuple[int, int] | None:
    """(height, width) of the map behind `prefix` class tokens: `grid` when it fits, else a square, else None."""
    cells = tokens - prefix
    if cells == grid[0] * grid[1]:
        return grid
    side = round(cells**0.5)
    return (side, side) if side * side == cells else None


MASKED = (
    "attention was called with a mask (or is_causal=True), which a shared cache would bypass; a causal mask would so "
    "leak the future. Mark padding by a padding mask; causal models need the memory 'grc_stream'"
)


def no_mask(mask: Tensor | None, is_causal: bool = False) -> None:
    """Refuse an attention mask: a shared cache shows every token the whole segment, past any mask.

    Raises:
        ValueError: there is a mask, or the causal flag is set.
    """
    if mask is not None or is_causal:
        raise ValueError(MASKED)


PER_QUERY = (
    "the attention mask differs between queries, but a shared cache shows every token the whole segment, past any "
    "mask (a causal mask would so leak the future); pass a mask of padding alone, (rows, tokens)"
)


def padding_of(mask: Tensor | None, tokens: int, why: str = PER_QUERY) -> Tensor | None:
    """Padding (B, N), True = padding, from a mask over keys: (B, N) with 1 = keep, or (B, 1, 1 or N, N) bool or
    additive. `why` is said when the mask is none of padding.

    Raises:
        ValueError: the mask has another shape, or hides from one query what it shows another (a causal mask).
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise ValueError(
            f"an attention mask of type {type(mask).__name__} (flex attention) does not tell the padding; call "
            "model.set_attn_implementation('sdpa') or 'eager' first"
        )
    if mask.dim() == 4 and mask.shape[1] == 1 and mask.shape[-1] == tokens:
        insist((mask == mask[:, :, :1]).all(), why)
        mask = mask[:, 0, 0]
        return ~mask if mask.dtype == torch.bool else mask < 0
    if mask.dim() == 2 and mask.shape[-1] == tokens:
        return mask == 0
    raise ValueError(f"cannot read padding from an attention mask of shape {tuple(mask.shape)} over {tokens} tokens")
