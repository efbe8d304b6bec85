"""Train a memory at many distances, from the nearest to one that grows as it is solved.

A memory trained at one distance learns that distance. So cue and question are at random distances (the curricula of RMT
at a million tokens, arXiv:2304.11062, and ARMT, arXiv:2407.04841).

The learning rate is constant until the farthest distance is solved, or the steps are nearly over, and then falls to 0
along a cosine: surviving a million updates needs exact weights more than many steps.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Generator, nn

from cached_lab.training.reconstruction_loss import ReconstructionLoss
from cached_transformers.loops.replay import ReplayLoop
from cached_transformers.loops.segments import SegmentLoop

from .protocol import LINES, ProbeSizes, Say, score, silent, training_step
from .tasks import ProbeTask

REPLAYED = 64
"""Segments of an episode from which on backward recomputes activations."""
SETTLE = 0.25
"""Share of the steps in which the learning rate falls."""


@dataclass(frozen=True)
class Course:
    """The distances of a training.

    Attributes:
        nearest, farthest: segments between cue and question; each step samples one of them. At distance 0, which some
            tasks have, both share a segment: attention learns to answer there, before the memory has to.
        solved: accuracy that advances the curriculum.
        recall: weight of reconstructing each segment from the memory (`ReconstructionLoss`); 0 for none.
        through: the largest distance of each stage; none for a curriculum that starts with the nearest, and goes half
            as far again whenever the farthest so far is solved.
    """

    nearest: int = 1
    farthest: int = 7
    solved: float = 0.99
    recall: float = 0.0
    through: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "through", tuple(self.through))  # a list, if read from a file
        ends, through = (self.nearest, self.farthest), self.through
        if not 0 <= self.nearest <= self.farthest or not self.farthest:
            raise ValueError(
                f"distances {self.nearest}..{self.farthest} of a training must be NEAREST..FARTHEST, the farthest at "
                "least 1 segment"
            )
        if through and (sorted({*through}) != [*through] or (through[0], through[-1]) != ends):
            listed = ",".join(map(str, through))
            raise ValueError(f"distances {listed} of a training must rise from {ends[0]} to {ends[1]}")
        if not 0 < self.solved <= 1:
            raise ValueError(f"solved={self.solved} is a share of right answers, above 0 and at most 1; e.g. 0.95")
        if not self.recall >= 0:
            raise ValueError(f"recall={self.recall} must not be negative; 0 leaves it out")

    @property
    def stages(self) -> list[int]:
        """The largest distance of each stage."""
        stages = [*self.through] or [self.nearest]
        while stages[-1] < self.farthest:
            stages.append(min(max(stages[-1] + 1, stages[-1] * 3 // 2), self.farthest))
        return stages


@dataclass(frozen=True)
class Trained:
    """Result of a training: the farthest solved distance (0 for none), the accuracy at the distance of the last stage,
    and the step at which each stage was solved."""

    solved: int
    accuracy: float
    steps: int
    solved_at: dict[int, int]


def train_by_distance(
    model: nn.Module,
    task: ProbeTask,
    course: Course,
    sizes: ProbeSizes,
    *,
    seed: int = 0,
    passes: int = 1,
    whole: bool = False,
    say: Say = silent,
) -> Trained:
    """Train a model on a task at random distances.

    Args:
        sizes: `steps` are the most; `enough` is not used. seed: of the episodes.
        passes: readings of each episode. whole: read each episode as one segment.
        say: receives lines of progress.
    """
    loop = loop_of(model, task, course, passes, whole)
    optimizer = torch.optim.AdamW(model.parameters(), sizes.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    generator = Generator().manual_seed(seed)
    stages, stage, solved_at = course.stages, 0, {}
    settling = max(1, int(sizes.steps * SETTLE))
    falls_from, accuracy, step = sizes.steps - settling, 0.0, 0
    while step < falls_from + settling:
        rate = _rate(step, falls_from, settling, warm=min(100, settling))
        for group in optimizer.param_groups:
            group["lr"] = sizes.learning_rate * rate
        distance = int(torch.randint(course.nearest, stages[stage] + 1, (), generator=generator))
        loss = training_step(loop, optimizer, task.draw(sizes.batch_size, distance, generator))
        step += 1
        if step % sizes.check_every and step != falls_from + settling:
            continue
        accuracy = score(model, task.part("valid"), stages[stage], sizes.rows, passes, whole=whole).accuracy
        solved = accuracy >= course.solved and stages[stage] not in solved_at
        if solved or step % (LINES * sizes.check_every) == 0:
            line = f"step {step:>5}/{falls_from + settling}  loss {loss.item():.4f}  {100 * accuracy:.1f} % right"
            say(f"{line} at {stages[stage]} of {stages[-1]} segments{', solved' if solved else ''}")
        if not solved:
            continue
        solved_at[stages[stage]] = step
        if stage + 1 < len(stages) and step < falls_from:
            stage += 1
        elif stage + 1 == len(stages):
            falls_from = min(falls_from, step)
    return Trained(max(solved_at, default=0), accuracy, step, solved_at)


def loop_of(model: nn.Module, task: ProbeTask, course: Course, passes: int = 1, whole: bool = False) -> SegmentLoop:
    """Return the loop that reads the episodes of a training; arguments as of `train_by_distance`."""
    pieces = 1 if whole else course.farthest + 1
    length = (course.farthest + 1) * task.segment // pieces
    kind = SegmentLoop if pieces < REPLAYED else ReplayLoop
    scoring = ReconstructionLoss(course.recall) if course.recall else None
    loop = kind(model, length, pieces, passes, scoring=scoring)
    loop._steps.done = True  # some episodes are one segment, on purpose: no warning
    return loop


def _rate(step: int, falls_from: int, settling: int, warm: int) -> float:
    """Return the share of the learning rate: rising, constant, and falling along a cosine."""
    if step < falls_from:
        return min(1.0, (step + 1) / warm)
    return 0.5 * (1 + math.cos(math.pi * (step - falls_from) / settling))


def ladder(segment: int, tokens: int) -> list[int]:
    """Return distances 1, 2, 5, 10, 20, ..., 1,000, 10,000, ... in segments, up to `tokens`.

    Above 1,000 only powers of ten follow: each distance reads a text, and those between would double the work.
    """
    most = max(1, tokens // segment)
    steps = (factor * 10**power for power in itertools.count() for factor in ((1, 2, 5) if power < 3 else (1,)))
    return [*itertools.takewhile(lambda distance: distance < most, steps), most]
