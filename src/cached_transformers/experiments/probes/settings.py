"""What each memory is probed with: options that put the cue within its reach, and options that put it beyond.

A memory without an entry is probed with its own defaults and no claim about a bound. Bounds are those of the theory:
tokens that an output can depend on, given the number of layers.

Legend: L tokens of a segment, N layers, M slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cached_transformers.registry import MEMORIES
from cached_transformers.seam.memory import ModelMemory

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
        learning_rate: in place of that of the sizes.
        why: why there is no bound, or what else to know.
    """

    within: Options = lambda task, distance, sizes: {}
    beyond: Options | None = None
    passes: int = 1
    learning_rate: float | None = None
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


def _fixed(**options: Any) -> Options:
    return lambda task, distance, sizes: options


def _compressive(task: ProbeTask, distance: int, sizes: Sizes) -> dict[str, Any]:
    return {"length": task.segment, "compressed": (distance + 1) * task.segment // 2, "rate": 2}


def _signal(task: ProbeTask, distance: int, sizes: Sizes) -> dict[str, Any]:
    return {"length": task.segment, "chunk": task.segment, "basis": 16, "widths": (0.05, 0.1)}


def _regions(task: ProbeTask, distance: int, sizes: Sizes) -> dict[str, Any]:
    regions = distance + 1
    return {"segment": task.segment, "regions": regions, "topk": regions, "scale": True, "rescale": True}


def _one_region(task: ProbeTask, distance: int, sizes: Sizes) -> dict[str, Any]:
    _one_segment(task, distance, sizes)
    return {"segment": task.segment, "regions": 1, "topk": 1}


def _store(task: ProbeTask, distance: int, sizes: Sizes) -> dict[str, Any]:
    """All of the episode is in the store of the first layer, and nearly all of it is found."""
    length = (distance + 1) * task.segment
    return {"length": length, "k": length, "layer": 1}


def _short_store(task: ProbeTask, distance: int, sizes: Sizes) -> dict[str, Any]:
    return _one_segment(task, distance, sizes) | {"k": task.segment, "layer": 1}


SETTINGS: dict[str, Setting] = {
    "compressive": Setting(_compressive, lambda *given: _one_segment(*given) | {"compressed": 0, "rate": 1}),
    "crtn": Setting(_regions, _one_region),
    "ernie_doc": Setting(_whole),
    "feedback": Setting(_whole),
    "grc_stream": Setting(lambda task, distance, sizes: {"length": 2 * task.segment, "ratio": 1.0}),
    "infinity_former": Setting(_signal),
    "memformer": Setting(_fixed(length=2, temperature=0.5), learning_rate=1e-3),
    "memorizing": Setting(_store, _short_store),
    "memory_transformer": Setting(why="carries nothing from segment to segment, so it has to fail"),
    "read_twice": Setting(_fixed(scope="earlier", first_read="plain", summary="mean"), passes=2),
    "rmt": Setting(_fixed(length=4)),
    "segatron": Setting(_whole, _one_segment),
    "transformer_xl": Setting(_whole, _one_segment),
}


def setting(memory: str) -> Setting:
    """The setting of a registered memory."""
    return SETTINGS.get(memory, Setting())


def stream_memories() -> list[str]:
    """Registered memories that a causal language model may have, but for those whose one state serves all rows."""
    found = []
    for entry in MEMORIES:
        kind: Any = entry.factory
        states = issubclass(kind, ModelMemory) or "state" in kind.needs
        if "whole_segment" not in kind.needs and states:
            found.append(entry.name)
    return found
