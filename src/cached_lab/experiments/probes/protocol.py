"""How a memory is probed: a small language model is trained on one task, and its answers are counted at every distance.

Each memory is tried three times with the same sizes, seeds and steps: with options that put the cue within its reach,
with options that put it beyond, where its theory knows such a bound, and without the memory, which must stay at chance.

Legend: B rows, N tokens of an episode.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cached_transformers.integrations.models import create_model
from cached_transformers.layers.stack import ModelOutput
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.memories import MemorySpec
from cached_transformers.models.segments import read_segments
from cached_transformers.state import State, reorder

from .callbacks import Check, Tell, unheard
from .tasks import IGNORED, Episode, ProbeTask


@dataclass(frozen=True)
class Sizes:
    """The model that is trained, and for how long. Training ends early when `enough` is reached.

    Attributes:
        steps: the most. check_every: steps between two looks at the accuracy on `rows` new episodes, behind each of
            which a curriculum may go on: rare looks leave most of the steps to distances that are long solved.
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


class Score(NamedTuple):
    """Share of the asked tokens that are right, and of the episodes of which all are (exact match)."""

    accuracy: float
    exact: float


@dataclass(frozen=True)
class Outcome:
    """Accuracy at the trained distance, on new episodes, and at others; steps until it was enough, or all.

    `exact` counts, at the trained distance, the episodes of which every answer is right.
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
    sizes: Sizes | None = None,
    passes: int = 1,
    distances: Sequence[int] = (),
    tell: Tell = unheard,
) -> Outcome:
    """Train a model with a memory on a task, and count its right answers.

    The gradient crosses the whole episode; a memory that cuts it itself has to do without. Every episode begins with
    a fresh state.

    Args:
        distance: segments between cue and question in training.
        passes: readings of each episode (memories that read twice).
        distances: where the trained model is tried too.
        tell: is told of the training whenever its accuracy is measured.
    """
    sizes = sizes or Sizes()
    started = time.perf_counter()
    torch.manual_seed(seed)
    model = build_model(task, memory, sizes)
    accuracy, steps = train(model, task, distance, sizes, seed=seed, passes=passes, tell=tell)
    asked = task.part("test")
    by_distance = {d: measure(model, asked, d, sizes.rows, passes) for d in distances}
    exact = score(model, asked, distance, sizes.rows, passes).exact
    parameters = sum(p.numel() for p in model.parameters())
    return Outcome(accuracy, steps, time.perf_counter() - started, parameters, by_distance, exact)


def train(
    model: nn.Module,
    task: ProbeTask,
    distance: int,
    sizes: Sizes,
    *,
    seed: int = 0,
    passes: int = 1,
    bptt: int | None = None,
    tell: Tell = unheard,
) -> tuple[float, int]:
    """Train a model on a task, until its accuracy is enough or the steps are over.

    Args:
        seed: of the episodes.
        bptt: segments that a gradient may cross; None for all.
        tell: as of `probe`.

    Returns:
        The accuracy at the trained distance, and the steps done.
    """
    loop = SegmentLoop(model, task.segment, distance + 1 if bptt is None else bptt, passes)
    optimizer = torch.optim.AdamW(model.parameters(), sizes.learning_rate, weight_decay=0.01)
    generator = torch.Generator().manual_seed(seed)
    accuracy, step = 0.0, 0
    for step in range(1, sizes.steps + 1):
        episode = task.draw(sizes.batch_size, distance, generator)
        optimizer.zero_grad()
        loss = loop(*episode)[0]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % sizes.check_every == 0 or step == sizes.steps:
            accuracy = measure(model, task.part("valid"), distance, sizes.rows, passes)
            solved = accuracy >= sizes.enough
            tell(Check(step, sizes.steps, loss.item(), distance, distance, accuracy, solved))
            if solved:
                break
    return accuracy, step


class Forgetful(nn.Module):
    """A model that begins every segment as if it were the first: the control, where a model carries more than a memory.

    Args:
        model: called as `model(inputs, state)`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def init_state(self, rows: int) -> State:
        return self.model.init_state(rows)  # type: ignore[operator, no-any-return]

    def forward(self, inputs_BN: Tensor, state: State | None = None, **options: Any) -> ModelOutput:
        out: ModelOutput = self.model(inputs_BN, None, **options)
        return out


def build_model(task: ProbeTask, memory: MemorySpec, sizes: Sizes) -> nn.Module:
    """The language model that is probed; one without a memory knows nothing of earlier segments."""
    model = create_model(
        "language_model",
        vocabulary=task.vocabulary,
        width=sizes.width,
        depth=sizes.depth,
        heads=sizes.heads,
        feed_forward=sizes.feed_forward,
        memory=memory,
        short_convolution=sizes.short_convolution,
        **sizes.model,
    )
    return Forgetful(model) if memory is None and sizes.short_convolution > 1 else model


def measure(model: nn.Module, task: ProbeTask, distance: int, rows: int, *more: Any, **how: Any) -> float:
    """The accuracy of `score`, with the same arguments."""
    return score(model, task, distance, rows, *more, **how).accuracy


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
) -> Score:
    """Shares of right answers on `rows` episodes that no training draws.

    Args:
        forget, shuffle: two ways to ask whether it is the state that answers; where it is, either leaves a guess. The
            last segment begins with no state, or with that of the row before it.
        whole: the episode is read as one segment: what attention alone can do.
    """
    training = model.training
    model.eval()
    episode = task.draw(rows, distance, torch.Generator().manual_seed(seed + distance))

    def before_last(state: State) -> State | None:
        if forget:
            return None
        return reorder(state, torch.arange(rows).roll(1)) if shuffle else state

    segment = episode.inputs_BN.shape[1] if whole else task.segment
    guesses_BN = _guesses(model, segment, episode, passes, before_last)
    model.train(training)
    asked_BN = episode.targets_BN != IGNORED
    right_BN = (guesses_BN == episode.targets_BN).double()
    return Score(right_BN[asked_BN].mean().item(), right_BN.masked_fill(~asked_BN, 1).prod(1).mean().item())


def _guesses(
    model: nn.Module, segment: int, episode: Episode, passes: int, before_last: Callable[[State], State | None]
) -> Tensor:
    """The best guess at every place, (B, N); `before_last` gives the state of the last segment."""
    segments = episode.inputs_BN.split(segment, 1)
    last = len(segments) - 1

    def read(index: int, state: State, reset_B: Tensor | None) -> ModelOutput:
        out: ModelOutput = model(segments[index], before_last(state) if index and index == last else state)
        return out

    state = SegmentLoop(model, segment, len(segments), passes).earlier_passes(*episode)
    return torch.cat([out.outputs.argmax(-1) for out in read_segments(read, range(len(segments)), state)], 1)
