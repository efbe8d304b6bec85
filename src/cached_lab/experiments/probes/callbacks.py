"""What a probe says while it works: how a training goes, and each answer as it is counted.

Trainings and questions are told where they happen, to a function that is handed down; who shows them, and whether they
crossed the border of a process on their way, nothing here knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Check(NamedTuple):
    """A training at one of its steps.

    Attributes:
        step, steps: done, and of the whole training, which may still become fewer.
        loss: of this step's batch, in nats per asked token.
        distance, farthest: segments from cue to question: the most that are trained now, and in the end.
        accuracy: share of right answers at `distance`, on episodes that are not trained on.
        solved: whether `distance` is solved now, and was not before.
    """

    step: int
    steps: int
    loss: float
    distance: int
    farthest: int
    accuracy: float
    solved: bool


class Answer(NamedTuple):
    """Share of right answers of a trained model, `tokens` after the cue, in texts that are read as streams."""

    tokens: int
    accuracy: float


News = Check | Answer
Tell = Callable[[News], object]


def unheard(news: News) -> None:
    """Nobody listens."""
