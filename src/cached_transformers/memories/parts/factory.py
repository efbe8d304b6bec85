"""Build memories from names and options, as calls and recipes give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from cached_transformers.interfaces.memory import LayerMemory, ModelMemory
from cached_transformers.registry import MEMORIES

from .composite import side_by_side

OneMemory: TypeAlias = str | dict[str, Any]
"""A memory in a recipe or a call: its name, or {"name": ..., option: value}."""
MemorySpec: TypeAlias = OneMemory | list[OneMemory] | None
"""Memory of a model: None, one memory, or several side by side."""


def memory_specs(memory: MemorySpec) -> list[tuple[str, dict[str, Any]]]:
    """Names and options of the memories of a model: none, one, or those of a list."""
    if memory is None:
        return []
    if isinstance(memory, list | tuple):
        if not memory:
            raise ValueError("memory=[] lists no memory; a model without one takes memory=None")
        return [_name_and_options(one) for one in memory]
    return [_name_and_options(memory)]


def memory_spec(memory: MemorySpec) -> tuple[str, dict[str, Any]] | None:
    """Name and options of one memory, given as None, "name", or {"name": ..., option: value}.

    Raises:
        ValueError: unknown name or option (with a suggestion), a dict without "name", or several memories.
    """
    specs = memory_specs(memory)
    if len(specs) > 1:
        names = ", ".join(name for name, _ in specs)
        raise ValueError(f"memory=[{names}] are several, which models of this package take; name one here")
    return specs[0] if specs else None


def _name_and_options(memory: OneMemory) -> tuple[str, dict[str, Any]]:
    if not isinstance(memory, str | Mapping):
        raise ValueError(f"memory={memory!r} must be a name, or a mapping with the key 'name'")
    options = {"name": memory} if isinstance(memory, str) else dict(memory)
    if "name" not in options:
        raise ValueError(
            f"memory={memory!r} must be a name or have the key 'name' (known: {', '.join(MEMORIES.names())})"
        )
    name = options.pop("name")
    options = MEMORIES.with_preset(name, options)
    MEMORIES.check(name, options)
    if "channels" in options:
        raise ValueError(f"memory {name!r}: channels={options['channels']!r} is set by the model; leave it out")
    return name, options


def create_memory(memory: MemorySpec, width: int, heads: int, **facts: Any) -> LayerMemory | ModelMemory:
    """Build a memory for a layer of `width` and `heads`; of a list, several that are side by side in one layer.

    `facts` are the model's properties (length, size, prefix, ...); a memory that has such an option gets it,
    unless the user set it. A memory that builds another one takes the mapping of all of them as its option `facts`.

    Raises:
        ValueError: an option out of its range, or options that exclude each other.
    """
    built = [_create(name, options, width, heads, facts) for name, options in memory_specs(memory)]
    if len(built) == 1:
        return built[0]
    for one in built:
        if isinstance(one, ModelMemory):
            raise ValueError(
                f"memory {type(one).__name__} spans the layers, and a list with it is for the option memory of a "
                "model; name it alone here"
            )
    return side_by_side(built)  # type: ignore[arg-type]


def _create(
    name: str, options: dict[str, Any], width: int, heads: int, facts: Mapping[str, Any]
) -> LayerMemory | ModelMemory:
    entry = MEMORIES.entry(name)
    offered = {**facts, "facts": dict(facts)}
    if isinstance(entry.factory, type) and issubclass(entry.factory, ModelMemory):
        offered.pop("length", None)  # a model memory's length has nothing to do with that of a layer's input
    taken = {k: v for k, v in offered.items() if k in entry.options and k not in options}
    needed = [n for n, p in entry.options.items() if p.default is p.empty and n not in ("width", "heads")]
    missing = [n for n in needed if n not in taken and n not in options]
    if missing:
        raise ValueError(
            f"memory {name!r} needs {', '.join(missing)}, which this model does not know; "
            f"give it as {{'name': {name!r}, {missing[0]!r}: ...}}"
        )
    return entry.build(width, heads, **taken, **options)  # type: ignore[no-any-return]
