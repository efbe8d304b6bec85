"""What each memory is probed with: options that put the cue within its reach, and options that put it beyond.

A memory without an entry is probed with its own defaults and no claim about a bound. Bounds are those of the theory:
tokens that an output can depend on, given the number of layers.

Legend: L tokens of a segment, N layers, M slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..memories.base import ModelMemory
from ..registry import MEMORIES
from .protocol import Sizes
from .tasks import ProbeTask

Options = Callable[[ProbeTask, int, Sizes], dict[str, Any]]
"""Options of a memory for a task, a distance and the sizes of the model."""


@dataclass(frozen=True)
class Setting:
    """How one memory is probed.

    Attributes:
        within: options with which the cue is in reach.
        beyond: options with which it is not; None where the theory knows no bound.
        passes: readings of each episode.
        why: why there is no bound, or what else to know.
    """

    within: Options = lambda task, distance, sizes: {}
    beyond: Options | None = None
    passes: int = 1
    why: str = ""


def _whole(task: ProbeTask, distance: int, sizes: Sizes) -> dict[str, Any]:
    return {"length": (distance + 1) * task.segment}


def _one_segment(task: ProbeTask, distance: int, sizes: Sizes) -> dict[str, Any]:
    """M = L reaches L - 1 + N L tokens back, short of a cue N + 1 segments away.

    Raises:
        ValueError: the cue is nearer.
    """
    if distance <= sizes.depth:
        raise ValueError(
            f"distance={distance} is within reach of a memory of one segment in {sizes.depth} layers; "
            f"take at least {sizes.depth + 1}"
        )
    return {"length": task.segment}


SETTINGS: dict[str, Setting] = {
    "transformer_xl": Setting(_whole, _one_segment),
    "grc_stream": Setting(lambda task, distance, sizes: {"length": 2 * task.segment, "ratio": 1.0}),
}


def setting(memory: str) -> Setting:
    """The setting of a registered memory."""
    return SETTINGS.get(memory, Setting())


def stream_memories() -> list[str]:
    """Registered memories that a causal language model may have, with a state for each row."""
    found = []
    for entry in MEMORIES:
        shared = getattr(entry.factory, "shared", False)
        kind = getattr(entry.factory, "insertion", "none")
        remembers = kind != "none" or issubclass(entry.factory, ModelMemory)  # type: ignore[arg-type]
        if getattr(entry.factory, "causal", True) and not shared and remembers:
            found.append(entry.name)
    return found
