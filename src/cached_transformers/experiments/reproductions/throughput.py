"""A table that is measured, not trained: its rows timed in turn, beside the paper's numbers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cached_transformers.experiments.benchmarks import vision
from cached_transformers.experiments.environment import environment
from cached_transformers.experiments.reports.wording import environment_text
from cached_transformers.training.metrics import jsonable

from .table9 import Throughput, beside_the_paper


@dataclass(frozen=True)
class Measured:
    """What was measured.

    Attributes:
        environment: versions, device and settings.
        rows: of `experiments.benchmarks.vision`. text: the tables as Markdown.
    """

    environment: dict[str, Any]
    rows: list[Any]
    text: str

    def write(self, folder: Path, name: str, command: str) -> Path:
        """Write throughput.json and throughput.md; returns the path of the second.

        Args:
            name: of the table. command: how a user asked for it.
        """
        folder.mkdir(parents=True, exist_ok=True)
        rows = [dataclasses.asdict(row) for row in self.rows]
        content = {"command": command, "environment": self.environment, "rows": rows}
        (folder / "throughput.json").write_text(json.dumps(jsonable(content), indent=1), encoding="utf-8")
        path = folder / "throughput.md"
        path.write_text(f"# {name}\n\n```bash\n{command}\n```\n\n{self.text}\n", encoding="utf-8")
        return path


def measure(table: Throughput, scale: str, rows: str, overrides: Sequence[str]) -> Measured:
    """Time the models of a table on this machine, on a GPU where there is one.

    Args:
        rows: as `Throughput.chosen` takes them. overrides: of the settings of the scale, `key=value`.

    Raises:
        ValueError: an unknown model or setting.
        ImportError: timm is not installed.
    """
    settings = table.options(scale, overrides)
    models = table.chosen(scale, rows, list(vision.MODELS))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    facts = environment(device) | settings
    found = vision.run(
        settings["batch"],
        settings["rounds"],
        device,
        models=models,
        image_size=settings["image_size"],
        released=True,
    )
    text = "\n\n".join([vision.as_markdown(found), *beside_the_paper(found), environment_text(facts)])
    return Measured(facts, found, text)
