"""What a person sees while memories are probed: lines, and on a terminal a bar for each training."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import TaskID

from cached_lab.experiments.probes.callbacks import Check, DistanceAnswer, News
from cached_lab.experiments.probes.trials import Trial
from cached_lab.training.progress import training_bar

LINES = 10
"""Of a training, besides those that say that a distance is solved."""


class ProbeProgress:
    """Shows how trainings go, several at a time, and every answer as it is counted; use it as a context manager.

    Args:
        console: where to write. A terminal shows a bar for each training that is under way; in a pipe there are lines
            alone.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar = training_bar(console) if console.is_terminal else None
        self._bars: dict[Trial, TaskID] = {}
        self._said: dict[Trial, int] = {}

    def __enter__(self) -> ProbeProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def hear(self, trial: Trial, news: News) -> None:
        """Show what a trial says."""
        if isinstance(news, DistanceAnswer):
            self._line(f"{trial.name}: {_share(news.accuracy)} right, {news.tokens:,} tokens after the cue")
            return
        if self._bar is not None:
            if trial not in self._bars:
                self._bars[trial] = self._bar.add_task(escape(trial.name), values="")
            short = f"{_share(news.accuracy)} at {news.distance}/{news.farthest}"
            self._bar.update(self._bars[trial], completed=news.step, total=news.steps, values=short)
        if news.solved or news.step >= self._said.get(trial, 0) + news.steps / LINES:
            self._said[trial] = news.step
            solved = ", solved" if news.solved else ""
            values = f"loss {news.loss:.4f}  {_share(news.accuracy)} right at {_distance(news)}"
            self._line(f"{trial.name}: step {news.step:>5}/{news.steps}  {values}{solved}")

    def finished(self, trial: Trial, result: dict[str, Any]) -> None:
        """Show the result of a trial, whose bar goes."""
        if self._bar is not None and trial in self._bars:
            self._bar.remove_task(self._bars.pop(trial))
        self._line(trial.sentence(result))

    def _line(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _share(accuracy: float) -> str:
    return f"{100 * accuracy:.1f} %"


def _distance(news: Check) -> str:
    if news.distance == news.farthest:
        return f"{news.distance} segment{'s' * (news.distance > 1)}"
    return f"{news.distance} of {news.farthest} segments"
