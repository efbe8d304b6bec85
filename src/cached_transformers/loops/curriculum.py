"""A curriculum over the number of segments (RMT at a million tokens, arXiv:2304.11062; ARMT, arXiv:2407.04841).

A memory is trained on few segments first and on more later. Each step samples a number uniformly from 1 to the largest
of its stage, so that short inputs remain solved.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import overload

from cached_transformers.annotations import checked


@checked
class Curriculum(Sequence[int]):
    """Number of segments of each training step.

    It depends only on seed and step: training resumed at step k continues with `curriculum[k:]`, and all processes of a
    distributed run get the same numbers.

    Args:
        stages: largest number of segments of each stage, growing.
        steps_each: steps of every stage, or one number per stage.
        seed: of the samples.
        uniform: sample from 1 to the largest number; False always takes the largest.

    Raises:
        ValueError: no stage, a number below 1, stages that do not grow, or not one number of steps per stage.

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
                f"steps_each={steps_each} must be at least 1, one number or one for each of {len(self.stages)} stages"
            )

    def largest(self, step: int) -> int:
        """The largest number of segments at a step; after the last stage, the largest of that stage."""
        for stage, steps in zip(self.stages, self.steps, strict=True):
            step -= steps
            if step < 0:
                return stage
        return self.stages[-1]

    def segments(self, step: int) -> int:
        """Number of segments of a step; steps after the end belong to the last stage."""
        return sample_segments(self.largest(step), self.seed, step) if self.uniform else self.largest(step)

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


@checked
class AdaptiveCurriculum:
    """A curriculum that moves to the next stage when the current one is solved, as in RMT's million-token training.

    Args:
        stages: largest number of segments of each stage, growing.
        solved: accuracy, above 0 and up to 1, that ends a stage.
        seed: see `Curriculum`.

    Attributes:
        stage: current stage, from 0; the only value to save for a resume.

    Raises:
        ValueError: no stage, a number below 1, stages that do not grow, or an accuracy out of range.
    """

    def __init__(self, stages: Sequence[int], solved: float, *, seed: int = 0) -> None:
        self.stages, self.solved, self.seed, self.stage = tuple(stages), solved, seed, 0
        check_stages(self.stages)
        if not 0 < solved <= 1:
            raise ValueError(f"solved={solved} must be an accuracy above 0 and up to 1")

    def largest(self) -> int:
        """The largest number of segments of the current stage."""
        return self.stages[self.stage]

    def segments(self, step: int) -> int:
        """Number of segments of a step in the current stage."""
        return sample_segments(self.largest(), self.seed, step)

    def scored(self, accuracy: float) -> bool:
        """Move to the next stage if there is one and `accuracy` solves this one; return whether it moved."""
        moves = accuracy >= self.solved and self.stage + 1 < len(self.stages)
        self.stage += moves
        return moves


def sample_segments(largest: int, seed: int, step: int) -> int:
    """Sample a number from 1 to `largest` uniformly, as a function of seed and step."""
    return random.Random(f"{seed}:{step}").randint(1, largest)


def check_stages(stages: Sequence[int]) -> None:
    """Refuse (ValueError) no stage, a stage below 1, or stages that do not grow."""
    if not stages or min(stages) < 1:
        raise ValueError(f"stages={list(stages)} must be at least one number of segments, each at least 1")
    if any(a >= b for a, b in itertools.pairwise(stages)):
        raise ValueError(f"stages={list(stages)} must grow; one stage of many steps is [{stages[-1]}]")
