"""Probe a memory: train a small language model on one task, and count its right answers at every distance.

Each memory is tried three times with the same sizes, seeds and steps: with options that reach the cue, with options
that do not, if its theory knows such a bound, and without the memory, which must stay at chance.

Legend: B rows, N tokens of a piece.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from cached_transformers.integrations.models import create_model
from cached_transformers.layers.stack import ModelOutput
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.memories import MemorySpec
from cached_transformers.state import State, last_use, reorder

from .tasks import IGNORED, Episode, ProbeTask

Say = Callable[[str], object]
LINES = 10
"""Checks between two lines of progress."""


def silent(line: str) -> None:
    """Ignore a line of progress."""


@dataclass(frozen=True)
class ProbeSizes:
    """Size of the model and length of its training, which ends early when the accuracy reaches `enough`.

    Attributes:
        steps: the most. check_every: steps between two checks on `rows` new episodes. A check may advance a
            curriculum, so rare checks spend most of the steps on solved distances. model: further options of the model.
    """

    width: int = 32
    depth: int = 2
    heads: int = 4
    feed_forward: int = 64
    batch_size: int = 64
    learning_rate: float = 3e-3
    steps: int = 1500
    check_every: int = 25
    enough: float = 0.995
    rows: int = 512
    short_convolution: int = 1
    model: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ProbeOutcome:
    """Accuracy on new episodes at the trained distance and at others, and the steps of the training.

    `exact` is the share of episodes at the trained distance with all answers right.
    """

    accuracy: float
    steps: int
    seconds: float
    parameters: int
    distances: dict[int, float]
    exact: float


def probe(
    task: ProbeTask,
    memory: MemorySpec,
    distance: int,
    *,
    seed: int = 0,
    sizes: ProbeSizes | None = None,
    passes: int = 1,
    whole: bool = False,
    distances: Sequence[int] = (),
    say: Say = silent,
) -> ProbeOutcome:
    """Train a model with a memory on a task, and count its right answers.

    The gradient crosses the whole episode, unless the memory detaches its state. Every episode begins with a new state.

    Args:
        distance: segments between cue and question in training.
        passes: readings of each episode (for memories that read twice). whole: read each episode as one segment.
        distances: further distances to measure.
        say: receives lines of progress.
    """
    sizes = sizes or ProbeSizes()
    started = time.perf_counter()
    torch.manual_seed(seed)
    model = build_model(task, memory, sizes)
    accuracy, steps = train(model, task, distance, sizes, seed=seed, passes=passes, whole=whole, say=say)
    asked = task.part("test")
    by_distance = {d: score(model, asked, d, sizes.rows, passes, whole=whole).accuracy for d in distances}
    exact = score(model, asked, distance, sizes.rows, passes, whole=whole).exact
    parameters = sum(p.numel() for p in model.parameters())
    return ProbeOutcome(accuracy, steps, time.perf_counter() - started, parameters, by_distance, exact)


def train(
    model: nn.Module,
    task: ProbeTask,
    distance: int,
    sizes: ProbeSizes,
    *,
    seed: int = 0,
    passes: int = 1,
    bptt: int | None = None,
    whole: bool = False,
    say: Say = silent,
) -> tuple[float, int]:
    """Train a model at one distance, until its accuracy is enough or the steps are over; return both.

    Args:
        seed: of the episodes. say: as in `probe`. bptt: segments that a gradient may cross; None for all.
        whole: as in `probe`.
    """
    length, pieces = (task.segment * (distance + 1), 1) if whole else (task.segment, distance + 1)
    loop = SegmentLoop(model, length, pieces if bptt is None else bptt, passes)
    loop._steps.done |= whole  # one segment, on purpose: no warning
    optimizer = torch.optim.AdamW(model.parameters(), sizes.learning_rate, weight_decay=0.01)
    generator = Generator().manual_seed(seed)
    accuracy, step = 0.0, 0
    for step in range(1, sizes.steps + 1):
        loss = training_step(loop, optimizer, task.draw(sizes.batch_size, distance, generator))
        if step % sizes.check_every == 0 or step == sizes.steps:
            accuracy = score(model, task.part("valid"), distance, sizes.rows, passes, whole=whole).accuracy
            solved = accuracy >= sizes.enough
            if solved or step % (LINES * sizes.check_every) == 0:
                say(f"step {step:>5}/{sizes.steps}  loss {loss.item():.4f}  {100 * accuracy:.1f} % right")
            if solved:
                break
    return accuracy, step


def training_step(loop: SegmentLoop, optimizer: torch.optim.Optimizer, episode: Episode) -> Tensor:
    """Take one optimizer step on a batch, and return its loss."""
    optimizer.zero_grad()
    loss = loop(*episode)[0]
    loss.backward()
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()
    return loss


class Forgetful(nn.Module):
    """Control without a state: reads every segment as the first, for models that carry more than a memory."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def init_state(self, rows: int) -> State:
        return self.model.init_state(rows)  # type: ignore[operator, no-any-return]

    def forward(self, inputs_BN: Tensor, state: State | None = None, **options: Any) -> ModelOutput:
        out: ModelOutput = self.model(inputs_BN, None, **options)
        return out


def build_model(task: ProbeTask, memory: MemorySpec, sizes: ProbeSizes) -> nn.Module:
    """Return the probed language model; without a memory it knows nothing of earlier segments."""
    names = ("width", "depth", "heads", "feed_forward", "short_convolution")
    options = {name: getattr(sizes, name) for name in names} | sizes.model
    model = create_model("language_model", vocabulary=task.vocabulary, memory=memory, **options)
    return Forgetful(model) if memory is None and sizes.short_convolution > 1 else model


class ProbeScore(NamedTuple):
    """Share of right answers, and share of episodes with all answers right (exact match)."""

    accuracy: float
    exact: float


@torch.no_grad()
def score(
    model: nn.Module,
    task: ProbeTask,
    distance: int,
    rows: int,
    passes: int = 1,
    seed: int = 10**6,
    *,
    forget: bool = False,
    shuffle: bool = False,
    whole: bool = False,
    stateless: bool = False,
) -> ProbeScore:
    """Count right answers on `rows` episodes that no training uses, read as streams.

    Only one segment and one state are in memory at a time; with several passes, all segments.

    Args:
        forget, shuffle: read the last segment with no state, or with the state of the row before it. Either reduces the
            answers to guesses if they depend on the state.
        whole: read the episode as one segment, with attention only.
        stateless: the model reads every segment as the first; segments without a question are then left out.
    """

    def episode() -> Iterable[Episode]:
        generator = Generator().manual_seed(seed + distance)
        if whole:
            return [task.draw(rows, distance, generator)]
        return task.stream(rows, distance, generator)

    training, state = model.training, None
    model.eval()
    if passes > 1:
        both = (torch.cat(parts, 1) for parts in zip(*episode(), strict=True))
        state = SegmentLoop(model, task.segment, distance + 1, passes).earlier_passes(*both)
    right_B = asked_B = torch.zeros(rows, dtype=torch.long)
    for index, (inputs_BN, targets_BN) in enumerate(episode()):
        asked_BN = targets_BN != IGNORED
        if stateless and not bool(asked_BN.any()):
            continue
        if index and index == distance and forget:
            state = None
        elif index and index == distance and shuffle:
            state = reorder(state, torch.arange(rows).roll(1))
        with last_use(state):
            outputs, state, *_ = model(inputs_BN.contiguous(), state)  # one memory layout: compiled once
        right_B = right_B + ((outputs.argmax(-1) == targets_BN) & asked_BN).sum(1)
        asked_B = asked_B + asked_BN.sum(1)
    model.train(training)
    return ProbeScore((right_B.sum() / asked_B.sum()).item(), (right_B == asked_B).double().mean().item())
