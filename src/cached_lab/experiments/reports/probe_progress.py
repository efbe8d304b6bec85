"""Progress of `cached probe`: lines, and on a terminal a bar per training."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import TaskID

from cached_lab.experiments.probes.protocol import DistanceAnswer, News
from cached_lab.experiments.probes.trials import Trial
from cached_lab.training.progress import training_bar

LINES = 10
"""Lines of a training, besides those that report a solved distance."""


class ProbeProgress:
    """Shows several trainings at a time, and every answer as it is counted; use it as a context manager.

    Args:
        console: a terminal shows a bar for each running training; a pipe gets lines only.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar = training_bar(console) if console.is_terminal else None
        self._bars: dict[Trial, TaskID] = {}
        self._last: dict[Trial, int] = {}

    def __enter__(self) -> ProbeProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def hear(self, trial: Trial, news: News) -> None:
        """Show a message of a trial."""
        share = f"{100 * news.accuracy:.1f} %"
        if isinstance(news, DistanceAnswer):
            self._line(f"{trial.name}: {share} right, {news.tokens:,} tokens after the cue")
            return
        if self._bar is not None:
            if trial not in self._bars:
                self._bars[trial] = self._bar.add_task(escape(trial.name), values="")
            short = f"{share} at {news.distance}/{news.farthest}"
            self._bar.update(self._bars[trial], completed=news.step, total=news.steps, values=short)
        if news.solved or news.step >= self._last.get(trial, 0) + news.steps / LINES:
            self._last[trial] = news.step
            distance = f"{news.distance} of {news.farthest} segments"
            if news.distance == news.farthest:
                distance = f"{news.distance} segment{'s' * (news.distance > 1)}"
            values = f"loss {news.loss:.4f}  {share} right at {distance}{', solved' if news.solved else ''}"
            self._line(f"{trial.name}: step {news.step:>5}/{news.steps}  {values}")

    def finished(self, trial: Trial, result: dict[str, Any]) -> None:
        """Show the result of a trial, and remove its bar."""
        if self._bar is not None and trial in self._bars:
            self._bar.remove_task(self._bars.pop(trial))
        self._line(trial.sentence(result))

    def _line(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
