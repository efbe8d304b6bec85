"""Options of a memory for probe tasks, given at its registration: `@MEMORIES.register(..., probe=Probing(...))`.

A probe task puts a cue into one segment and the question some segments later. A memory gives options with which the cue
is within its reach, and options with which it is beyond. Bounds are theoretical: the tokens that an output can depend
on, given the number of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Options = Callable[[int, int, int], Mapping[str, Any]]
"""Options of a memory, given (segment, distance, depth): tokens of a segment, segments between cue and question, layers
of the model."""


def fixed(**options: Any) -> Options:
    """The same options for every task."""
    return lambda segment, distance, depth: options


@dataclass(frozen=True)
class Probing:
    """Probe options of one memory; the default is the memory's own options and no claim about a bound.

    Attributes:
        within: options with which the cue is in reach.
        beyond: options with which it is not; None if the theory knows no bound.
        farther: options for training at many distances, up to the given one, and tests at any; None for `within`.
        passes: readings of each episode.
        learning_rate: None for the probed model's.
        why: the reason for a missing bound, or another remark.
    """

    within: Options = lambda *_: {}
    beyond: Options | None = None
    farther: Options | None = None
    passes: int = 1
    learning_rate: float | None = None
    why: str = ""

    @property
    def far(self) -> Options:
        """The options of a probe by distance."""
        return self.farther or self.within


def whole_episode(segment: int, distance: int, depth: int) -> Mapping[str, Any]:
    """A store that holds all tokens from the cue to the question."""
    return {"length": (distance + 1) * segment}


def one_segment(segment: int, distance: int, depth: int) -> Mapping[str, Any]:
    """A store of one segment of L tokens in each of N layers.

    It reaches L - 1 + N L tokens back, short of a cue that is N + 1 segments away.

    Raises:
        ValueError: the cue is nearer.
    """
    if distance <= depth:
        raise ValueError(
            f"distance={distance} is within reach of a memory of one segment in {depth} layers; "
            f"take at least {depth + 1}"
        )
    return {"length": segment}
