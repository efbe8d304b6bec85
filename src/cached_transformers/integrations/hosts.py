"""How a model that somebody else wrote is described: one function for each class of attention layers.

Legend: B rows, N tokens, H heads, E head width, D = H * E model width.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from cached_transformers.seam.memory import LayerMemory, Query


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


def sites(model: nn.Module, settings: dict[str, Any], memory: bool = True) -> list[tuple[Site, Host]]:
    """Each self-attention layer, with its host description; refuses attention classes without an adapter."""
    for module in (
        *("torch_nn", "timm.adapters"),
        *("transformers.image_encoders", "transformers.encoders", "transformers.decoders"),
    ):
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
