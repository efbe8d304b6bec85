"""Memories. Importing this package imports every file in it, which registers the memories of that file.

Every registered memory is exported under its class name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cached_transformers.interfaces.memory import (
    Context,
    Entry,
    LayerMemory,
    ModelMemory,
    Query,
    Reading,
    Tokens,
    Trace,
)
from cached_transformers.registry import MEMORIES

from .grc import GatedRecurrentCache
from .parts.factory import MemorySpec, OneMemory, create_memory, memory_spec, memory_specs

__all__ = [
    "Context",
    "Entry",
    "GatedRecurrentCache",
    "LayerMemory",
    "MemorySpec",
    "ModelMemory",
    "OneMemory",
    "Query",
    "Reading",
    "Tokens",
    "Trace",
    "create_memory",
    "memory_spec",
    "memory_specs",
]

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """The registered classes, to type checkers, which find them typed in their own files."""


_registered = MEMORIES.import_files(__name__, __path__)
globals().update(_registered)
__all__ += _registered
