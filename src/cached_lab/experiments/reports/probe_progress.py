"""Progress of `cached probe` in lines."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from cached_lab.experiments.probes.protocol import DistanceAnswer, News
from cached_lab.experiments.probes.trials import Trial

LINES = 10
"""Lines of a training, besides those that report a solved distance."""


class ProbeProgress:
    """Shows several trainings at a time, and every answer as it is counted."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._last: dict[Trial, int] = {}

    def hear(self, trial: Trial, news: News) -> None:
        """Show a message of a trial."""
        share = f"{100 * news.accuracy:.1f} % right"
        if isinstance(news, DistanceAnswer):
            self._line(f"{trial.name}: {share}, {news.tokens:,} tokens after the cue")
        elif news.solved or news.step >= self._last.get(trial, 0) + news.steps / LINES:
            self._last[trial] = news.step
            values = f"loss {news.loss:.4f}  {share} at {news.distance} of {news.farthest} segments"
            self._line(f"{trial.name}: step {news.step:>5}/{news.steps}  {values}{', solved' if news.solved else ''}")

    def finished(self, trial: Trial, result: dict[str, Any]) -> None:
        """Show the result of a trial."""
        self._line(trial.sentence(result))

    def _line(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
