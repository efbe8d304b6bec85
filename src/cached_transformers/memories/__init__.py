"""Memories; importing this package imports every file in it, which registers what the file defines.

What is registered here is exported under the name of its class, without a list of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from cached_transformers.registry import MEMORIES
from cached_transformers.seam.memory import Context, Entry, LayerMemory, ModelMemory, Query, Reading, Tokens, Trace

from .grc import GatedRecurrentCache

__all__ = [
    "Context",
    "Entry",
    "GatedRecurrentCache",
    "LayerMemory",
    "MemorySpec",
    "ModelMemory",
    "Query",
    "Reading",
    "Tokens",
    "Trace",
    "create_memory",
    "memory_spec",
]

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """The registered classes, to type checkers, which find them typed in their own files."""


MemorySpec: TypeAlias = str | dict[str, Any] | None
"""A memory in a recipe or a call: None, its name, or {"name": ..., option: value}."""


def memory_spec(memory: MemorySpec) -> tuple[str, dict[str, Any]] | None:
    """Name and options of a memory given as None, "name", or {"name": ..., option: value}.

    Raises:
        ValueError: unknown name or option (with a suggestion), or a dict without "name".
    """
    if memory is None:
        return None
    options = {"name": memory} if isinstance(memory, str) else dict(memory)
    if "name" not in options:
        raise ValueError(
            f"memory={memory!r} must be a name or have the key 'name' (known: {', '.join(MEMORIES.names())})"
        )
    name = options.pop("name")
    MEMORIES.check(name, options)
    return name, options


def create_memory(memory: MemorySpec, width: int, heads: int, **known: Any) -> LayerMemory | ModelMemory:
    """Build a memory for a layer of `width` and `heads`.

    `known` holds what the model knows about itself (length, size, prefix, ...); a memory that has such an option gets
    it, unless the user set it.

    Raises:
        ValueError: unknown name or option, a needed option that nobody gave, or the memory's own constraints.
    """
    spec = memory_spec(memory)
    if spec is None:
        return LayerMemory()
    name, options = spec
    entry = MEMORIES.entry(name)
    if isinstance(entry.factory, type) and issubclass(entry.factory, ModelMemory):
        known.pop("length", None)  # a model memory's length has nothing to do with that of a layer's input
    facts = {k: v for k, v in known.items() if k in entry.options and k not in options}
    needed = [n for n, p in entry.options.items() if p.default is p.empty and n not in ("width", "heads")]
    missing = [n for n in needed if n not in facts and n not in options]
    if missing:
        raise ValueError(
            f"memory {name!r} needs {', '.join(missing)}, which this model does not know; "
            f"give it as {{'name': {name!r}, {missing[0]!r}: ...}}"
        )
    return entry.factory(width, heads, **facts, **options)


_registered = MEMORIES.import_files(__name__, __path__)
globals().update(_registered)
__all__ += _registered
