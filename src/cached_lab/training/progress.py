"""Progress of a training run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Reporter:
    """Display metrics lines and messages; a context manager around the training loop.

    Args:
        label: name of the run.
        steps: steps of the whole run.
        console: output; None is silent.
    """

    def __init__(self, label: str, steps: int, console: Console | None) -> None:
        self.label, self.steps, self.console = label, steps, console
        columns = (TextColumn("{task.description}"), BarColumn(12), MofNCompleteColumn(), TimeRemainingColumn())
        values = TextColumn("{task.fields[values]}")
        self._bar = Progress(*columns, values, console=console or Console(quiet=True))
        self._bar.disable = console is None or not console.is_terminal
        self._task = self._bar.add_task(escape(label), total=steps, values="")

    def __enter__(self) -> Reporter:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def advance(self, step: int) -> None:
        """Move the bar to `step`."""
        self._bar.update(self._task, completed=step)

    def line(self, values: Mapping[str, Any]) -> None:
        """Show a metrics line: training in the bar, evaluation as text, both as text without a terminal."""
        loss = [f"loss {values['loss']:.4f}"] if "loss" in values else []  # detectors have no loss in evaluation
        text = "  ".join(filter(None, [*loss, second_score(values)]))
        if values["split"] == "train":
            self._bar.update(self._task, values=text)
            if not self._bar.disable:
                return
            text += f"  learning rate {values['learning_rate']:.2e}"
        self.message(f"{self.label}  step {values['step']:>6}/{self.steps}  {values['split']:<10}  {text}")

    def message(self, text: str) -> None:
        """Show a line of text."""
        if self.console is not None:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def second_score(values: Mapping[str, Any]) -> str:
    """Return the score shown after the loss: accuracy, bits per byte, perplexity with BLEU, or average precisions."""
    if "accuracy" in values:
        stage = ""
        if "stage_accuracy" in values:  # a curriculum over lengths; the other score is for full lengths
            at = f"{values['stage_segments']} segments, the stage of the curriculum"
            stage = f"  {values['stage_accuracy']:.2%} at {at}"
        return f"accuracy {values['accuracy']:.2%}{stage}"
    if "bits_per_byte" in values:
        return f"bits per byte {values['bits_per_byte']:.4f}"
    if "perplexity" in values:
        bleu = f"  BLEU {values['bleu']:.2f}" if "bleu" in values else ""
        return f"perplexity {values['perplexity']:.2f}{bleu}"
    return "  ".join(f"{name} {value:.3f}" for name, value in values.items() if "_ap" in name)
