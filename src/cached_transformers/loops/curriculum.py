"""A curriculum over the number of segments (RMT at a million tokens, arXiv:2304.11062; ARMT, arXiv:2407.04841).

A memory is trained on few segments first and on more later. In each stage the number is drawn uniformly from 1 to the
largest of the stage, so that short inputs remain solved.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import overload


class Curriculum(Sequence[int]):
    """How many segments each training step takes.

    The number of a step depends on the seed and the step alone: training resumed at step k goes on with
    `curriculum[k:]`, and all processes of a distributed run, given one seed, draw the same.

    Args:
        stages: largest number of segments of each stage, growing.
        steps_each: steps of every stage, or of each stage.
        seed: of the draws.
        uniform: draw from 1 to the largest number; False always takes the largest.

    Raises:
        ValueError: no stage, a number below 1, stages that do not grow, or not one number of steps for each stage.

    Example:
        >>> for segments in Curriculum([1, 2, 3], steps_each=1000):
        ...     tokens = batch(segments * 64 + 1)
        ...     loss, _ = SegmentLoop(model, 64, bptt=segments)(tokens[:, :-1], tokens[:, 1:])
    """

    def __init__(
        self, stages: Sequence[int], steps_each: int | Sequence[int], *, seed: int = 0, uniform: bool = True
    ) -> None:
        self.stages = tuple(stages)
        self.steps = (steps_each,) * len(self.stages) if isinstance(steps_each, int) else tuple(steps_each)
        self.seed, self.uniform = seed, uniform
        check_stages(self.stages)
        if len(self.steps) != len(self.stages) or min(self.steps) < 1:
            raise ValueError(
                f"steps_each={steps_each} must be a number of at least 1, or one for each of {len(self.stages)} stages"
            )

    def largest(self, step: int) -> int:
        """The largest number of segments at a step; that of the last stage from the end on."""
        for stage, steps in zip(self.stages, self.steps, strict=True):
            step -= steps
            if step < 0:
                return stage
        return self.stages[-1]

    def segments(self, step: int) -> int:
        """How many segments a step takes; from the end on as in the last stage."""
        return drawn(self.largest(step), self.seed, step) if self.uniform else self.largest(step)

    def __len__(self) -> int:
        return sum(self.steps)

    @overload
    def __getitem__(self, step: int) -> int: ...

    @overload
    def __getitem__(self, step: slice) -> list[int]: ...

    def __getitem__(self, step: int | slice) -> int | list[int]:
        if isinstance(step, slice):
            return [self[i] for i in range(*step.indices(len(self)))]
        if step < 0:
            step += len(self)
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of a curriculum of {len(self)} steps")
        return self.segments(step)

    def __iter__(self) -> Iterator[int]:
        return (self[step] for step in range(len(self)))


class AdaptiveCurriculum:
    """A curriculum whose next stage begins when this one is solved, as RMT was trained at a million tokens.

    Args:
        stages: largest number of segments of each stage, growing.
        solved: accuracy, above 0 and up to 1, with which a stage is over.
        seed: of the draws, as of `Curriculum`.

    Attributes:
        stage: which one it is, from 0: all that has to be saved to go on.

    Raises:
        ValueError: no stage, a number below 1, stages that do not grow, or a share out of range.
    """

    def __init__(self, stages: Sequence[int], solved: float, *, seed: int = 0) -> None:
        self.stages, self.solved, self.seed, self.stage = tuple(stages), solved, seed, 0
        check_stages(self.stages)
        if not 0 < solved <= 1:
            raise ValueError(f"solved={solved} must be an accuracy above 0 and up to 1")

    def largest(self) -> int:
        """The largest number of segments of the stage."""
        return self.stages[self.stage]

    def segments(self, step: int) -> int:
        """How many segments a step takes, as long as the stage lasts."""
        return drawn(self.largest(), self.seed, step)

    def scored(self, accuracy: float) -> bool:
        """Go on to the next stage, if there is one and documents of this one are solved; whether it did."""
        moves = accuracy >= self.solved and self.stage + 1 < len(self.stages)
        self.stage += moves
        return moves


def drawn(largest: int, seed: int, step: int) -> int:
    """A number from 1 to the largest, uniformly: a function of the seed and the step alone."""
    # A generator of its own for every step costs microseconds and needs no state to be saved.
    return random.Random(f"{seed}:{step}").randint(1, largest)


def check_stages(stages: Sequence[int]) -> None:
    """Refuse (ValueError) stages that are none, below 1, or do not grow."""
    if not stages or min(stages) < 1:
        raise ValueError(f"stages={list(stages)} must be at least one number of segments, each at least 1")
    if any(a >= b for a, b in itertools.pairwise(stages)):
        raise ValueError(f"stages={list(stages)} must grow; one stage of many steps is [{stages[-1]}]")
