"""Table 9: throughput of backbones plain and with GRC, in training and in inference.

Nothing is trained: both models are timed in turn, in one process, on this machine. The paper's numbers are images a
second on a V100, one measurement each, with an unknown batch size (arXiv:2312.12742, table 9).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cached_lab.experiments.costs.throughput import MODELS, measure_throughput, throughput_table
from cached_lab.experiments.environment import environment
from cached_lab.experiments.reports.formatting import environment_text
from cached_transformers.files import json_text, write_whole
from cached_transformers.registry import unknown_name

from .base import chosen_rows

PAPER = {"PVT-Tiny": ((313, 257), (930, 768))}
"""Images a second in training and in inference, plain and cached, in the paper's table."""
SUMMARY = "images: throughput of backbones plain and with GRC, in training and in inference"
SETTINGS = {
    "small": {"batch": 8, "rounds": 7, "image_size": 224},
    "paper": {"batch": 64, "rounds": 21, "image_size": 224},
}
ROWS = {"small": ("ViT-S", "PVT-Tiny", "Swin-T", "PVTv2-B2"), "paper": ("PVT-Tiny", "PVT-Small", "PVT-Medium")}
"""Models by scale."""


def settings_of(scale: str, overrides: Sequence[str]) -> dict[str, int]:
    """Return the settings of a scale, changed by `key=value` overrides."""
    found = dict(SETTINGS[scale])
    for override in overrides:
        key, _, value = override.partition("=")
        if key not in found:
            raise ValueError(unknown_name("setting of table9", key, list(found)))
        if not value.isdecimal() or int(value) < 1:
            raise ValueError(f"{override}: {key} must be a whole number from 1 on")
        found[key] = int(value)
    return found


def beside_the_paper(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Compare the ratios of cached models with those of the paper, a sentence for each row that the paper has."""
    lines = []
    for row in rows:
        if row["case"] == "plain" or row["model"] not in PAPER:
            continue
        (train, cached_train), (infer, cached_infer) = PAPER[row["model"]]
        lines.append(
            f"{row['model']}, {row['case']}: training takes {row['train'].median:.2f} times as long as the plain "
            f"model, inference {row['inference'].median:.2f}; in the paper (V100) {train / cached_train:.2f} and "
            f"{infer / cached_infer:.2f}."
        )
    return lines


def measure(scale: str, rows: str, overrides: Sequence[str], folder: Path, command: str) -> str:
    """Time the models of a scale on this machine, on a GPU if there is one; write throughput.json and throughput.md.

    Args:
        rows: model names, as `chosen_rows` takes them. overrides: `key=value` for settings of the scale.

    Returns:
        the measurements as Markdown.
    """
    settings = settings_of(scale, overrides)
    models = chosen_rows(rows, ROWS[scale], list(MODELS), list(MODELS)[:2])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    about = environment(device) | settings
    batch, rounds, side = settings["batch"], settings["rounds"], settings["image_size"]
    found = measure_throughput(batch, rounds, device, models=models, image_size=side)
    text = "\n\n".join([throughput_table(found), *beside_the_paper(found), environment_text(about)])
    records = [{**row, **{work: dataclasses.asdict(row[work]) for work in ("train", "inference")}} for row in found]
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "throughput.json", json_text({"command": command, "environment": about, "rows": records}))
    write_whole(folder / "throughput.md", f"# table9\n\n```bash\n{command}\n```\n\n{text}\n".encode())
    return text
