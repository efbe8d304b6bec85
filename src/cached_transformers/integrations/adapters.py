"""Memory for models that others wrote: `add_memory` and `remove_memory`.

The host's own code runs as it is. Three hooks on each attention layer let the memory in: what the layer receives is noted, the
merged heads are changed on their way into the output projection, and the projection's result is finished. What a class of
attention layers calls its projection and its heads, an *adapter* says, in one short function; see `register_adapter`.

Legend: B rows, N tokens, H heads, E head width, D = H * E model width.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..memories import create_memory, memory_spec
from ..memories.base import LayerMemory, Query, Reading
from ..memories.grc import commit_caches
from ..registry import MEMORIES


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
    """

    width: int
    heads: int
    projection: nn.Module | None
    query: Callable[..., Query]
    known: dict[str, Any] = field(default_factory=dict)
    install: Callable[[nn.Module, LayerMemory], None] | None = None
    uninstall: Callable[[nn.Module], None] | None = None


class Site:
    """Where an adapter stands: the layer, its name, the whole model, and the user's settings for all layers."""

    def __init__(self, model: nn.Module, name: str, layer: nn.Module, settings: dict[str, Any]) -> None:
        self.model, self.name, self.layer, self.settings = model, name, layer, settings

    def parent(self, levels: int = 1) -> nn.Module:
        """The module that holds the layer, or the one further up."""
        return self.model.get_submodule(self.name.rsplit(".", levels)[0] if self.name.count(".") >= levels else "")

    def length(self) -> int:
        """The `length` that the user set, for hosts that cannot know it.

        Raises:
            ValueError: it is not set.
        """
        if "length" not in self.settings:
            raise ValueError(
                f"{type(self.layer).__name__} does not tell how many tokens it will see; "
                "pass the number of cache slots, e.g. add_memory(model, 'grc', length=64)"
            )
        return int(self.settings["length"])


Adapter = Callable[[Site], Host | None]
_ADAPTERS: dict[str, Adapter] = {}


def register_adapter(*classes: str) -> Callable[[Adapter], Adapter]:
    """Decorator: the function describes attention layers of these classes (full dotted names, so that nothing is imported).

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
    """The hooks of one attention layer. Holds the layer's input between the hooks of one call."""

    def __init__(self, memory: LayerMemory, host: Host) -> None:
        self.memory, self.heads, self.make_query = memory, host.heads, host.query
        self.query: Query | None = None
        self.reading = Reading()

    def before_attention(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.query = self.make_query(*args, **kwargs)

    def before_projection(self, projection: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        y_BND = args[0]
        assert self.query is not None
        self.reading = self.memory.read((), self.query, None)
        y_BHNE = y_BND.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return (self.memory.combine(y_BHNE, self.query, self.reading).transpose(1, 2).flatten(2), *args[1:])

    def after_projection(self, projection: nn.Module, args: tuple[Any, ...], y_BND: Tensor) -> Tensor:
        assert self.query is not None
        query, reading = self.query, self.reading
        self.query, self.reading = None, Reading()  # keep no activation alive
        return self.memory.finish(y_BND, query, reading)


class CommitFirst:
    """Root hook: shared caches take over the last step's proposal before the model runs, outside recomputed regions."""

    def __call__(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        if model.training:
            commit_caches(model)


def add_memory(model: nn.Module, memory: str | dict[str, Any] = "grc", **options: Any) -> nn.Module:
    """Give every self-attention layer of `model` a memory, in place; weights and host code stay as they are.

    Works with timm's ViT and DeiT, Swin and PVTv2, torch.nn.MultiheadAttention and TransformerEncoder, and transformers' ViT and
    BERT; other classes by `register_adapter`. Train and save as before: the memory's parameters and caches live under
    `<attention layer>.memory` in the state dict.

    Args:
        model: the host model.
        memory: name of a shared memory, or {"name": ..., option: value}.
        options: options of the memory (`ratio`, `length`, `variant`, ...), and `input_size`, the (height, width) of images, for
            hosts that do not know it (PVTv2 made for other sizes than its default).

    Returns:
        The same model.

    Raises:
        ValueError: a layer's class has no adapter; the model has a memory already; the memory needs a state that the host cannot
            carry; or the memory's own constraints (ratio, heads).
    """
    name, settings = memory_spec(memory)  # type: ignore[misc]
    input_size = options.pop("input_size", None)
    MEMORIES.check(name, options)
    settings |= options
    shared = MEMORIES.entry(name).factory
    if not getattr(shared, "shared", False) and getattr(shared, "insertion", "none") != "none":
        raise ValueError(
            f"memory {name!r} carries a state from call to call, which {type(model).__name__} does not take or return; "
            "shared memories work here: 'grc'"
        )
    sites = _sites(model, settings | ({"input_size": input_size} if input_size is not None else {}))
    built = []
    for site, host in sites:  # build all before touching the model: a refusal leaves it as it was
        if any(child == "memory" for child, _ in site.layer.named_children()):
            raise ValueError(f"{site.name or type(model).__name__} has a memory already; call remove_memory(model) first")
        reference = next(site.layer.parameters())
        layer = create_memory({"name": name, **settings}, host.width, host.heads, **host.known)
        layer = layer.to(reference.device, reference.dtype).train(site.layer.training)
        built.append((site, host, layer))
    for site, host, layer in built:
        _attach(site.layer, host, layer)  # type: ignore[arg-type]
    _disable_nested_tensors(model)
    model.register_forward_pre_hook(CommitFirst())
    return model


def _sites(model: nn.Module, settings: dict[str, Any]) -> list[tuple[Site, Host]]:
    """Each layer that gets a memory, with its host description; refuses attention classes without an adapter."""
    for module in ("torch_nn", "timm", "transformers"):
        importlib.import_module(f".{module}", __package__)
    found, known, strangers = [], [], []
    for name, layer in model.named_modules():
        if any(name == k or name.startswith(k + ".") for k in known if k):
            continue
        adapter = _adapter(layer)
        if adapter is not None:
            known.append(name)
            site = Site(model, name, layer, settings)
            host = adapter(site)
            if host is not None:
                found.append((site, host))
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
        layer.memory_hooks = host.uninstall  # type: ignore[assignment]
        return
    assert host.projection is not None
    tap = Tap(memory, host)
    layer.memory_hooks = [  # type: ignore[assignment]
        layer.register_forward_pre_hook(tap.before_attention, with_kwargs=True),
        host.projection.register_forward_pre_hook(tap.before_projection),
        host.projection.register_forward_hook(tap.after_projection),
    ]


def remove_memory(model: nn.Module) -> nn.Module:
    """Undo `add_memory`, in place: the host computes exactly what it computed before. Returns the model.

    Raises:
        ValueError: the model has no memory.
    """
    layers = [m for m in model.modules() if "memory_hooks" in vars(m)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no memory that could be removed")
    for layer in layers:
        hooks: Any = vars(layer).pop("memory_hooks")
        if callable(hooks):
            hooks(layer)
        else:
            for handle in hooks:
                handle.remove()
        del layer.memory
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, CommitFirst):
            del model._forward_pre_hooks[key]
    _restore_nested_tensors(model)
    return model


def _disable_nested_tensors(model: nn.Module) -> None:
    """TransformerEncoder's shortcut for padded inputs hands nested tensors to its layers, which a memory cannot read."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.nested_before_memory = module.use_nested_tensor  # type: ignore[assignment]
            module.use_nested_tensor = False


def _restore_nested_tensors(model: nn.Module) -> None:
    for module in model.modules():
        if "nested_before_memory" in vars(module):
            module.use_nested_tensor = vars(module).pop("nested_before_memory")


def map_size(tokens: int, prefix: int, grid: tuple[int, int]) -> tuple[int, int] | None:
    """(height, width) of the map behind `prefix` class tokens: `grid` when it fits, else a square, else None."""
    cells = tokens - prefix
    if cells == grid[0] * grid[1]:
        return grid
    side = round(cells**0.5)
    return (side, side) if side * side == cells else None


def no_mask(mask: Tensor | None, is_causal: bool = False) -> None:
    """Refuse an attention mask: a shared cache shows every token the whole segment, past any mask.

    Raises:
        ValueError: there is a mask, or the causal flag is set.
    """
    if mask is not None or is_causal:
        raise ValueError(
            "attention was called with a mask (or is_causal=True), which a shared cache would bypass; a causal mask would so "
            "leak the future. Mark padding by a padding mask; causal models need the memory 'grc_stream'"
        )


def padding_of(mask: Tensor | None, tokens: int) -> Tensor | None:
    """Padding (B, N), True = padding, from a mask over keys: (B, N) with 1 = keep, or (B, 1, 1 or N, N) bool or additive.

    Raises:
        ValueError: the mask has another shape.
    """
    if mask is None:
        return None
    if mask.dim() == 4 and mask.shape[1] == 1 and mask.shape[-1] == tokens:
        mask = mask[:, 0, 0]
        return ~mask if mask.dtype == torch.bool else mask < 0
    if mask.dim() == 2 and mask.shape[-1] == tokens:
        return mask == 0
    raise ValueError(f"cannot read padding from an attention mask of shape {tuple(mask.shape)} over {tokens} tokens")
