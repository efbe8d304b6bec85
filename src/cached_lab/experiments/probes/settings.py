"""Which memories can be probed, and with what: their own files say it at the registration (`seam.probing.Probing`)."""

from __future__ import annotations

from typing import Any

from cached_transformers.interfaces.memory import ModelMemory
from cached_transformers.interfaces.probing import Probing
from cached_transformers.registry import MEMORIES


def setting(memory: str) -> Probing:
    """The setting of a registered memory, a user's as well as ours; its defaults where it says nothing."""
    return MEMORIES.entry(memory).probe or Probing()


def stream_memories() -> list[str]:
    """Registered memories that a causal language model may have, but for those whose one state serves all rows."""
    found = []
    for entry in MEMORIES:
        kind: Any = entry.factory
        states = issubclass(kind, ModelMemory) or "state" in kind.needs
        if "bidirectional" not in kind.needs and states:
            found.append(entry.name)
    return found
