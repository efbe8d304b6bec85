"""Table 9: throughput of backbones plain and with GRC, in training and in inference.

Nothing is trained: `experiments/benchmarks/vision.py` times both in turn, in one process, here. The paper's numbers are
images a second on a V100, one measurement each (arXiv:2312.12742, table 9); it does not say with which batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cached_transformers.registry import unknown_name

PAPER = {"PVT-Tiny": ((313, 257), (930, 768))}
"""Images a second in training and in inference, plain and cached, of the paper's table, where they are known."""


@dataclass(frozen=True)
class Throughput:
    """A table of measurements.

    Attributes:
        summary: what it compares, in a line.
        settings: by scale, batch (images), rounds, and side of the images in pixels.
        models: by scale, names in `experiments.benchmarks.vision.MODELS`.
    """

    summary: str
    settings: Mapping[str, Mapping[str, int]]
    models: Mapping[str, Sequence[str]]

    def chosen(self, scale: str, rows: str, models: Sequence[str]) -> list[str]:
        """Models by `--rows`: "paper", "all", or names with commas between them.

        Raises:
            ValueError: an unknown name, or one twice.
        """
        if rows in ("paper", "all"):
            return list(self.models[scale] if rows == "paper" else models)
        names = [name for name in rows.split(",") if name]
        for name in names:
            if name not in models:
                raise ValueError(unknown_name("row", name, ["paper", "all", *models]))
        if not names or len(set(names)) < len(names):
            raise ValueError(f"--rows {rows!r} must be paper, all, or different names such as {','.join(models[:2])}")
        return names

    def options(self, scale: str, overrides: Sequence[str]) -> dict[str, int]:
        """The settings of a scale with `key=value` put in their place.

        Raises:
            ValueError: an unknown key, or a value that is no whole number from 1 on.
        """
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


TABLE9 = Throughput(
    summary="images: throughput of backbones plain and with GRC, in training and in inference",
    settings={
        "small": {"batch": 8, "rounds": 7, "image_size": 224},
        "paper": {"batch": 64, "rounds": 21, "image_size": 224},
    },
    models={
        "small": ("ViT-S", "PVT-Tiny", "Swin-T", "PVTv2-B2"),
        "paper": ("PVT-Tiny", "PVT-Small", "PVT-Medium"),
    },
)
