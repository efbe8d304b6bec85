"""Train a memory at many distances, and measure how far the trained memory holds.

A memory trained at one distance learns that distance. So cue and question are at random distances, from the nearest to
one that grows as it is solved (the curricula of RMT at a million tokens, arXiv:2304.11062, and ARMT, arXiv:2407.04841).
Then episodes of any length are read as a stream, segment by segment, in constant memory.

The learning rate is constant until the farthest distance is solved, or the steps are nearly over, and then falls to 0
along a cosine: surviving a million updates needs exact weights more than many steps.

Legend: B rows, N tokens of a segment.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

from cached_lab.training.reconstruction_loss import ReconstructionLoss
from cached_transformers.layers.stack import ModelOutput
from cached_transformers.loops.replay import ReplayLoop
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.loops.sliding import WINDOWS
from cached_transformers.models.segments import read_segments
from cached_transformers.registry import unknown_name
from cached_transformers.state import State

from .callbacks import Check, Tell, unheard
from .protocol import ProbeSizes, measure, training_step
from .tasks import IGNORED, Episode, ProbeTask

REPLAYED = 64
"""Segments of an episode from which on backward recomputes activations."""


@dataclass(frozen=True)
class Course:
    """The distances of a training.

    Attributes:
        nearest, farthest: segments between cue and question; each step samples one of them. At distance 0, which some
            tasks have, both share a segment: attention learns to answer there, before the memory has to.
        curriculum: start with the nearest only, and go half as far again whenever the farthest so far is solved.
        through: the largest distance of each stage instead, from the nearest to the farthest.
        solved: accuracy that advances the curriculum.
        settle: share of the steps in which the learning rate falls.
        bptt: segments that a gradient crosses; None for whole episodes.
        bptt_window: "blocks" or "sliding", see `SegmentLoop`.
        recall: weight of reconstructing each segment from the memory (`ReconstructionLoss`); 0 for none.
    """

    nearest: int = 1
    farthest: int = 7
    curriculum: bool = True
    solved: float = 0.99
    settle: float = 0.25
    bptt: int | None = None
    bptt_window: str = "blocks"
    recall: float = 0.0
    through: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "through", tuple(self.through))  # a list, if read from a file
        ends, through = (self.nearest, self.farthest), self.through
        listed = ",".join(map(str, through))
        if not 0 <= self.nearest <= self.farthest or not self.farthest:
            raise ValueError(
                f"distances {self.nearest}..{self.farthest} of a training must be NEAREST..FARTHEST, the farthest at "
                "least 1 segment"
            )
        if through and not self.curriculum:
            raise ValueError(f"distances {listed} are stages of a curriculum; take A..B for a training without one")
        if through and (sorted({*through}) != [*through] or (through[0], through[-1]) != ends):
            raise ValueError(f"distances {listed} of a training must rise from {ends[0]} to {ends[1]}")
        if not 0 < self.solved <= 1:
            raise ValueError(f"solved={self.solved} is a share of right answers, above 0 and at most 1; e.g. 0.95")
        if self.bptt_window not in WINDOWS:
            raise ValueError(unknown_name("bptt_window", self.bptt_window, list(WINDOWS)))
        if not self.recall >= 0:
            raise ValueError(f"recall={self.recall} must not be negative; 0 leaves it out")

    def settings(self) -> dict[str, Any]:
        """Return the settings stored with a training, without later options at their defaults."""
        later: dict[str, Any] = {"bptt": None, "bptt_window": "blocks", "recall": 0.0, "through": []}
        stated = asdict(self) | {"through": [*self.through]}
        return {name: value for name, value in stated.items() if name not in later or value != later[name]}

    @property
    def stages(self) -> list[int]:
        """The largest distance of each stage."""
        if not self.curriculum:
            return [self.farthest]
        if self.through:
            return [*self.through]
        stages = [self.nearest]
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
    tell: Tell = unheard,
) -> Trained:
    """Train a model on a task at random distances.

    Args:
        sizes: `steps` are the most; `enough` is not used. seed: of the episodes.
        passes: readings of each episode. whole: read each episode as one segment.
        tell: receives a `Check` whenever the accuracy is measured.
    """
    loop = loop_of(model, task, course, passes, whole)
    optimizer = torch.optim.AdamW(model.parameters(), sizes.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    generator = Generator().manual_seed(seed)
    stages, stage, solved_at = course.stages, 0, {}
    settling = max(1, int(sizes.steps * course.settle))
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
        accuracy = measure(model, task.part("valid"), stages[stage], sizes.rows, passes, whole=whole)
        solved = accuracy >= course.solved and stages[stage] not in solved_at
        tell(Check(step, falls_from + settling, loss.item(), stages[stage], stages[-1], accuracy, solved))
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
    bptt, kind = course.bptt or pieces, SegmentLoop if pieces < REPLAYED else ReplayLoop
    scoring = ReconstructionLoss(course.recall) if course.recall else None
    return kind(model, length, bptt, passes, scoring=scoring, bptt_window=course.bptt_window)


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


@torch.no_grad()
def holds(
    model: Any,
    task: ProbeTask,
    distance: int,
    rows: int,
    *,
    passes: int = 1,
    whole: bool = False,
    alone: bool = False,
    seed: int = 10**6,
) -> tuple[float, float]:
    """Return the shares of right answers, and of rows with all answers right, on episodes read as streams.

    Only one segment and one state are in memory at a time; with several passes, all segments.

    Args: as of `train_by_distance`.
        alone: the model reads every segment as the first; segments without a question are then left out.
    """
    training, task = model.training, task.part("test")
    model.eval()

    def episode() -> Iterator[Episode]:
        generator = Generator().manual_seed(seed + distance)
        if whole:
            return iter([task.draw(rows, distance, generator)])
        pieces = task.stream(rows, distance, generator)
        return (piece for piece in pieces if not alone or bool((piece.targets_BN != IGNORED).any()))

    def read(piece: Episode, state: State | None, reset_B: Tensor | None) -> ModelOutput:
        asked.append(piece.targets_BN)
        out: ModelOutput = model(piece.inputs_BN.contiguous(), state)  # one memory layout: compiled once
        return out

    state = None
    if passes > 1:
        whole_episode = (torch.cat(parts, 1) for parts in zip(*episode(), strict=True))
        state = SegmentLoop(model, task.segment, distance + 1, passes).earlier_passes(*whole_episode)
    asked: list[Tensor] = []
    right_B = asked_B = torch.zeros(rows, dtype=torch.long)
    for out in read_segments(read, episode(), state, in_place=True):
        targets_BN = asked.pop()
        places_BN = targets_BN != IGNORED
        if bool(places_BN.any()):
            right_B = right_B + ((out.outputs.argmax(-1) == targets_BN) & places_BN).sum(1)
            asked_B = asked_B + places_BN.sum(1)
    model.train(training)
    return (right_B.sum() / asked_B.sum()).item(), (right_B == asked_B).double().mean().item()
