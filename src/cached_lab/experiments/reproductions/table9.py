"""Table 9: throughput of backbones plain and with GRC, in training and in inference.

Nothing is trained: `experiments/benchmarks/vision.py` times both in turn, in one process, here. The paper's numbers are
images a second on a V100, one measurement each (arXiv:2312.12742, table 9); it does not say with which batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cached_lab.experiments.benchmarks import vision
from cached_lab.experiments.benchmarks.named import Measured
from cached_lab.experiments.environment import environment
from cached_transformers.files import json_text, write_whole
from cached_transformers.registry import unknown_name

from .base import chosen_rows

PAPER = {"PVT-Tiny": ((313, 257), (930, 768))}
"""Images a second in training and in inference, plain and cached, of the paper's table, where they are known."""


@dataclass(frozen=True)
class Throughput:
    """A table of measurements: its settings and the models of `benchmarks.vision.MODELS`, by scale."""

    summary: str
    settings: Mapping[str, Mapping[str, int]]
    models: Mapping[str, Sequence[str]]

    def chosen(self, scale: str, rows: str, models: Sequence[str]) -> list[str]:
        """Models by `--rows`, of all `models`."""
        return chosen_rows(rows, self.models[scale], models, models[:2])

    def options(self, scale: str, overrides: Sequence[str]) -> dict[str, int]:
        """The settings of a scale with `key=value` put in their place."""
        found = dict(self.settings[scale])
        for override in overrides:
            key, _, value = override.partition("=")
            if key not in found:
                raise ValueError(unknown_name("setting of table9", key, list(found)))
            if not value.isdecimal() or int(value) < 1:
                raise ValueError(f"{override}: {key} must be a whole number from 1 on")
            found[key] = int(value)
        return found


def beside_the_paper(rows: Sequence[Any]) -> list[str]:
    """A sentence for each cached row whose numbers the paper has: time per image as a multiple of the plain model's."""
    lines = []
    for row in rows:
        if row.case == "plain" or row.model not in PAPER:
            continue
        (train, cached_train), (infer, cached_infer) = PAPER[row.model]
        lines.append(
            f"{row.model}, {row.case}: training takes {row.train.median:.2f} times as long as the plain model, "
            f"inference {row.inference.median:.2f}; in the paper (V100) {train / cached_train:.2f} and "
            f"{infer / cached_infer:.2f}."
        )
    return lines


def write(measured: Measured, folder: Path, name: str, command: str) -> Path:
    """Write throughput.json and throughput.md; returns the path of the second."""
    rows = [dataclasses.asdict(row) for row in measured.rows]
    content = {"command": command, "environment": measured.settings, "rows": rows}
    path = folder / "throughput.md"
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "throughput.json", json_text(content))
    write_whole(path, f"# {name}\n\n```bash\n{command}\n```\n\n{measured.text}\n".encode())
    return path


def measure(table: Throughput, scale: str, rows: str, overrides: Sequence[str]) -> Measured:
    """Time the models of a table on this machine, on a GPU where there is one.

    Args:
        rows: as `Throughput.chosen` takes them. overrides: of the settings of the scale, `key=value`.
    """
    settings = table.options(scale, overrides)
    models = table.chosen(scale, rows, list(vision.MODELS))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    facts = environment(device) | settings
    found = vision.run(
        settings["batch"], settings["rounds"], device, models=models, image_size=settings["image_size"], released=True
    )
    return Measured(found, "\n\n".join([vision.as_markdown(found), *beside_the_paper(found)]), facts)


TABLE9 = Throughput(
    summary="images: throughput of backbones plain and with GRC, in training and in inference",
    settings={
        "small": {"batch": 8, "rounds": 7, "image_size": 224},
        "paper": {"batch": 64, "rounds": 21, "image_size": 224},
    },
    models={"small": ("ViT-S", "PVT-Tiny", "Swin-T", "PVTv2-B2"), "paper": ("PVT-Tiny", "PVT-Small", "PVT-Medium")},
)
