"""Progress messages of a probe: checks during a training, and each answer as it is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Check(NamedTuple):
    """A training at one of its steps.

    Attributes:
        step, steps: done, and of the whole training, which may still shrink.
        loss: of this step's batch, in nats per asked token.
        distance, farthest: segments from cue to question: the most at this step, and at the end.
        accuracy: at `distance`, on episodes that are not trained on.
        solved: True if `distance` is solved for the first time.
    """

    step: int
    steps: int
    loss: float
    distance: int
    farthest: int
    accuracy: float
    solved: bool


class DistanceAnswer(NamedTuple):
    """Accuracy of a trained model `tokens` after the cue, in texts read as streams."""

    tokens: int
    accuracy: float


News = Check | DistanceAnswer
Tell = Callable[[News], object]


def unheard(news: News) -> None:
    """Ignore a message."""
