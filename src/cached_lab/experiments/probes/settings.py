"""Memories that can be probed, with the settings from their registration (`interfaces.probing.Probing`)."""

from __future__ import annotations

from typing import Any

from cached_transformers.interfaces.memory import ModelMemory
from cached_transformers.interfaces.probing import Probing
from cached_transformers.registry import MEMORIES


def setting(memory: str) -> Probing:
    """Return the setting of a registered memory, or the defaults if it has none."""
    return MEMORIES.entry(memory).probe or Probing()


def stream_memories() -> list[str]:
    """Return registered memories for causal language models, without those that share one state among all rows."""
    found = []
    for entry in MEMORIES:
        kind: Any = entry.factory
        states = issubclass(kind, ModelMemory) or "state" in kind.needs
        if "bidirectional" not in kind.needs and states:
            found.append(entry.name)
    return found
