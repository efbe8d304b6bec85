"""Describe a host model to a memory: one function for each class of attention layers, its adapter.

The offers of a host, and the demands of its attention, are words of `interfaces/capabilities.py`, compared with the
needs of the memory (`refuse_memory`) and the abilities of an attention (`replace_attention.py`).

Legend: B rows, N tokens, M slots, H heads, G heads of keys, E head width, D = H * E model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.capabilities import CORE_WORDS, OWN_WORDS, PLACE_WORDS, refuse_misfit
from cached_transformers.interfaces.memory import LayerMemory, ModelMemory, Query
from cached_transformers.registry import MEMORIES

WHOLE = frozenset({"head", "bidirectional"})
"""Offers of a layer that is not causal: its tokens see the whole segment."""


@dataclass
class HostAttention:
    """A layer's softmax attention, for `replace_attention`.

    Attributes:
        asks: words of `CORE_WORDS`, which the replacement must be able to do.
        dropout: on the weights.
        padding: the layer's attention mask hides the same keys from all queries.
        switches: attributes of the layer that make it call `scaled_dot_product_attention`.
        install: for layers that never call it; makes room for an attention by other means. uninstall: undoes that.
        refusal: reason why the attention cannot be replaced.
    """

    asks: frozenset[str] = frozenset({"bidirectional"})
    dropout: float = 0.0
    padding: bool = False
    switches: dict[str, Any] = field(default_factory=dict)
    install: Callable[[nn.Module], None] | None = None
    uninstall: Callable[[nn.Module], None] | None = None
    refusal: str | None = None


@dataclass
class StoredStates:
    """The way in which a layer attends hidden states that a memory stored, beside those of its segment.

    Attributes:
        norm: applied by the block before the attention; None for no norm.
        turn: gives keys their positions as the layer does: (layer, rotary, keys (B, G, M, E), positions (B, M + N) of
            slots and tokens, tokens (B, N, D)) -> keys.
        rotary: the model's module of rotary positions, where `turn` needs it.
        slope: for logits that fall with the distance: (layer, keywords of its call, positions (B, M) of slots) ->
            additive mask, (B, H, 1, M), or None; it changes the keywords.
        cache: the keyword by which the layer gets its KV cache.
        more: reason why its logits are more than products of queries and keys, so that only it knows its weights.
    """

    norm: nn.Module | None
    turn: Callable[..., Tensor]
    rotary: nn.Module | None
    slope: Callable[..., Tensor | None] | None
    cache: str
    more: str = ""


@dataclass
class Stream:
    """The way in which a layer carries a state. A causal model must pass keywords on to its layers.

    Attributes:
        add: gives the model its memory, as `add_stream_memory`.
        block: the module around the layer, which adds its result to the tokens.
        sources: chains of modules, from the layer's input on, each of which gets the output of the one before it. Their
            outputs, in this order, `split` turns into queries (B, H, N, E), keys and values (B, G, N, E) without
            positions. There are three chains, or one for all.
        split: gets None for the first of three chains where no queries are needed.
        between: applied by the layer to the output of one module of a chain before the next one.
        longest: number of tokens that have positions; None for no limit.
        offers: words of `PLACE_WORDS`, "bias" and "context": offers to a model-level memory.
        window: number of tokens that a token of the layer sees, itself included; None where it sees all before it.
        causal: whether the layer is.
        cuts: whether the model's inputs can be cut into segments: texts can, an image is one segment.
        entrance: of a model that is not causal, its embedding modules in order: tokens of a memory join after them.
            Empty where the model has no such place.
        stored: of a causal layer that can attend hidden states of earlier segments.
    """

    add: Callable[..., None]
    block: nn.Module
    sources: tuple[tuple[nn.Module, ...], ...]
    split: Callable[..., tuple[Tensor | None, Tensor, Tensor]]
    between: Callable[[Tensor], Tensor] | None = None
    longest: int | None = None
    offers: frozenset[str] = frozenset()
    window: int | None = None
    causal: bool = True
    cuts: bool = True
    entrance: tuple[nn.Module, ...] = ()
    stored: StoredStates | None = None


@dataclass
class Host:
    """The way in which a memory meets one attention layer of a host model.

    Attributes:
        width: D. heads: H.
        projection: the output projection, of the merged heads (B, N, D); None when `install` handles everything. It is
            followed by its path in the model, as are the `sources` of a stream.
        query: returns the memory's `Query` of the layer's arguments.
        facts: options of a memory that the model knows: length, size, prefix, window, reduction, relative.
        install: for layers that never call their projection as a module; adds the memory by other means.
        uninstall: undoes `install`.
        attention: the layer's own attention.
        offers: words of `capabilities.py`, to the memory of the layer. A map of unknown size is square.
        lacks: by word of `capabilities.py`, the reason why the layer or its model does not offer it, and the way out.
        watch: a module of the model, and its forward pre-hook that records something for `query`.
        channels: of the layer's input, where they are not D.
        stream: of a layer that can carry a state.
        key_shape: number and width of its heads of keys, where they are not those of the queries.
    """

    width: int
    heads: int
    projection: nn.Module | None
    query: Callable[..., Query]
    facts: dict[str, Any] = field(default_factory=dict)
    install: Callable[[nn.Module, LayerMemory], None] | None = None
    uninstall: Callable[[nn.Module], None] | None = None
    attention: HostAttention = field(default_factory=HostAttention)
    offers: frozenset[str] = WHOLE | {"token_map"}
    lacks: Mapping[str, str] = field(default_factory=dict)
    watch: tuple[nn.Module, Callable[..., None]] | None = None
    channels: int | None = None
    stream: Stream | None = None
    key_shape: tuple[int, int] | None = None


class Site:
    """A layer for its adapter: the layer, its name, the whole model, and the user's settings for all layers.

    Attributes:
        memory: the layer is to get a memory; otherwise another attention.
        slots: that memory has slots for the tokens of a segment, and needs their number.
    """

    def __init__(
        self, model: nn.Module, name: str, layer: Any, settings: dict[str, Any], memory: bool = True, slots: bool = True
    ) -> None:
        self.model, self.name, self.layer = model, name, layer  # whose class is known only to its adapter
        self.settings, self.memory, self.slots = settings, memory, slots

    def refuse(self, why: str) -> None:
        """Raise ValueError if the layer is to get a memory."""
        if self.memory:
            raise ValueError(why)

    def parent(self, levels: int = 1) -> nn.Module:
        """The module that holds the layer, or one further up."""
        return self.model.get_submodule(self.name.rsplit(".", levels)[0] if self.name.count(".") >= levels else "")

    def block(self) -> nn.Module:
        """The nearest module around the layer that is in a list: one of the model's blocks."""
        parts = self.name.split(".")
        numbered = [place for place, part in enumerate(parts) if part.isdigit()]
        return self.model.get_submodule(".".join(parts[: numbered[-1] + 1])) if numbered else self.parent()

    def holder(self, attribute: str) -> nn.Module:
        """The nearest module above the layer that has the attribute; otherwise the whole model."""
        parts = self.name.split(".")
        for end in reversed(range(len(parts))):
            module = self.model.get_submodule(".".join(parts[:end]))
            if hasattr(module, attribute):
                return module
        return self.model

    def length(self, longest: int = 0) -> int:
        """The `length` that the user set, for hosts that do not know it; without slots, the `longest` that the host
        can take, 0 where it is not known.

        Raises:
            ValueError: it is not set, and a memory needs it.
        """
        if "length" in self.settings:
            at_least_one(length=self.settings["length"])
            return int(self.settings["length"])
        if not self.memory or not self.slots:
            return longest
        raise ValueError(
            f"{type(self.layer).__name__} does not tell how many tokens it will see; "
            "pass the number of cache slots, e.g. add_memory(model, 'grc', length=64)"
        )


Adapter = Callable[[Site], Host | None]
_ADAPTERS: dict[str, Adapter] = {}


def register_adapter(*classes: str) -> Callable[[Adapter], Adapter]:
    """Decorator: the function describes attention layers of these classes (full dotted names, so that nothing is
    imported). It returns None for a layer that remains as it is (a cross-attention).

    Example:
        >>> @register_adapter("my_package.model.MyAttention")
        ... def my_attention(site):
        ...     layer = site.layer
        ...     return Host(layer.dim, layer.heads, layer.out, lambda x: Query(x), facts={"length": site.length()})
    """

    def add(adapter: Adapter) -> Adapter:
        _ADAPTERS.update(dict.fromkeys(classes, adapter))
        return adapter

    return add


def register_left(*classes: str) -> None:
    """Let layers of these classes remain as they are, beside layers that take a memory."""
    register_adapter(*classes)(lambda site: None)


_RECURRENT: set[str] = set()


def register_recurrent(*classes: str) -> None:
    """Let layers of these classes remain as they are, and carry the state that they keep in the host's cache."""
    register_left(*classes)
    _RECURRENT.update(classes)


def is_recurrent(layer: nn.Module) -> bool:
    """Return True for a layer of a class of `register_recurrent`."""
    return any(f"{kind.__module__}.{kind.__qualname__}" in _RECURRENT for kind in type(layer).__mro__)


def sites(
    model: nn.Module, settings: dict[str, Any], memory: bool = True, slots: bool = True
) -> list[tuple[Site, Host]]:
    """Each self-attention layer, with its host description; refuses attention classes without an adapter."""
    found: list[tuple[Site, Host]] = []
    described: list[str] = []
    strangers: list[tuple[str, nn.Module]] = []
    for name, layer in model.named_modules():
        if any(not outer or name == outer or name.startswith(outer + ".") for outer in described):
            continue
        kinds = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(layer).__mro__)
        adapter = next((_ADAPTERS[kind] for kind in kinds if kind in _ADAPTERS), None)
        if adapter is not None:
            described.append(name)
            site = Site(model, name, layer, settings, memory, slots)
            host = adapter(site)
            if host is not None:
                found.append((site, host))
        elif isinstance(layer, LayerMemory):
            continue  # a memory that is there already is no attention of the host's
        elif "attention" in type(layer).__name__.lower() or type(layer).__name__.endswith("Attn"):
            strangers.append((name, layer))
    strangers = [(n, m) for n, m in strangers if not any(inner.startswith(n + ".") for inner in described)]
    if strangers or not found:
        classes = sorted({f"{type(m).__module__}.{type(m).__qualname__}" for _, m in strangers})
        if not classes:
            left = way_out = ""
            if described:
                left = f" except those without memory ({described[0] or 'itself'}: of a decoder, or a pooling head)"
                way_out = "; give the encoder, or take create_model('encoder_decoder', memory=...)"
            raise ValueError(f"{type(model).__name__} has no attention layer for a memory{left}{way_out}")
        raise ValueError(
            f"{type(model).__name__}: no adapter for attention class {', '.join(classes)}; describe the class with "
            "cached_transformers.register_adapter (docs/support.md lists the known models)"
        )
    return found


def refuse_memory(
    name: str, model: nn.Module, hosts: list[Host], layers: Sequence[LayerMemory], spanning: ModelMemory | None = None
) -> None:
    """Compare the needs of a memory with the offers of each layer, and of the whole model where it spans them.

    Args:
        hosts: of the layers. layers: the memory of each. spanning: the memory to which these belong.

    Raises:
        ValueError: the memory needs something that is not offered.
    """
    who, title, options = f"memory {name!r}", type(model).__name__, MEMORIES.entry(name).options
    known = [*PLACE_WORDS, *OWN_WORDS, *CORE_WORDS]  # in the order of importance
    page = "docs/support.md lists the memories that fit"

    def refuse(memory: LayerMemory | ModelMemory, offers: frozenset[str], lacks: Mapping[str, str]) -> None:
        needs = dict.fromkeys([w for w in known if w in memory.needs] + sorted(memory.needs.difference(known)), who)
        if isinstance(memory, LayerMemory) and memory.window() is not None:
            needs.setdefault("bias", f"the window of {who}")
        missing = next((word for word in needs if word not in offers), "")
        without = MEMORIES.entry(name).info.get("without", {}).get(missing)
        way_out = filter(None, (lacks.get(missing), f"take {without}" if without else None, page))
        refuse_misfit(needs, offers, title, "; ".join(way_out))
        if memory.position_scheme() is not None:
            way = "take relative=False" if "relative" in options else page
            raise ValueError(f"{who} has a position scheme of its own beside that of {title}; {way}")

    if spanning is not None:
        by_model = frozenset.intersection(*(host.stream.offers if host.stream else frozenset() for host in hosts))
        if not by_model:
            why = hosts[0].lacks.get("spans", f"{title} has no place for it")
            raise ValueError(f"{who} spans the layers; {why}; {page}")
        refuse(spanning, by_model, hosts[0].lacks)
    for host, layer in zip(hosts, layers, strict=True):
        refuse(layer, host.offers, host.lacks)
