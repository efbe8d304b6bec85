"""How long training stands still for its checkpoints, saved at once and in the background, and how long runs take.

The same run is trained in turn without saves, with `training.save=sync` and with `async`, round by round, in folders
of their own that are removed. Seconds are those of a clock on the wall: a save waits for the disk, and a thread that
writes takes its time from the steps where no core is free.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cached_lab.experiments.build import build_dataset, build_model
from cached_lab.experiments.reports.markdown import table
from cached_lab.tasks.kinds import make_task
from cached_lab.tasks.recipes import config_from_dict, fill_from_data
from cached_lab.training.distributed import World
from cached_lab.training.progress import Reporter
from cached_lab.training.trainer import Trainer

WAYS = ("none", "sync", "async")
STEPS, EVERY = 24, 6
WIDTH, DEPTH = 384, 4


@dataclass(frozen=True)
class Row:
    """One way of saving.

    Attributes:
        way: "none" saves at the end alone, as the others do, too.
        stalls: seconds of each save but the last, for which training stands still.
        whole: seconds of each run, until all is on disk.
        mebibytes: of one checkpoint.
    """

    way: str
    stalls: tuple[float, ...]
    whole: tuple[float, ...]
    mebibytes: float


class _Timed(Trainer):
    """A trainer that keeps how long each save kept it."""

    stalls: list[float]

    def save(self) -> None:
        begin = time.perf_counter()
        super().save()
        self.stalls.append(time.perf_counter() - begin)


def run(rounds: int, device: str, steps: int = STEPS, every: int = EVERY, width: int = WIDTH) -> list[Row]:
    """Train in every way, `rounds` times each."""
    stalls: dict[str, list[float]] = {way: [] for way in WAYS}
    whole: dict[str, list[float]] = {way: [] for way in WAYS}
    size = 0.0
    for index in range(rounds):
        for way in WAYS if index % 2 else reversed(WAYS):
            with tempfile.TemporaryDirectory() as folder:
                trainer = _trainer(Path(folder), way, device, steps, every, width)
                begin = time.perf_counter()
                trainer.fit()
                whole[way].append(time.perf_counter() - begin)
                stalls[way] += trainer.stalls[:-1]
                last = trainer.checkpoints.paths()[-1]
                size = sum(file.stat().st_size for file in last.rglob("*") if file.is_file()) / 2**20
    return [Row(way, tuple(stalls[way]), tuple(whole[way]), size) for way in WAYS]


def _trainer(folder: Path, way: str, device: str, steps: int, every: int, width: int) -> _Timed:
    text = folder / "text"
    text.mkdir()
    letters = np.random.Generator(np.random.PCG64(0)).integers(97, 123, 50_000, dtype=np.uint8)
    for split in ("train", "valid", "test"):
        (text / f"{split}.txt").write_bytes(letters.tobytes())
    training: dict[str, Any] = {"steps": steps, "save_every": steps if way == "none" else every}
    training |= {"evaluate_every": steps, "save": "sync" if way == "none" else way, "device": device}
    training |= {"batch_size": 8, "segment_length": 64, "segments": 2, "bptt": 2, "tensorboard": False}
    memory = {"name": "transformer_xl", "length": 64}
    sizes = {"width": width, "depth": DEPTH, "heads": 4, "feed_forward": 4 * width}
    config = config_from_dict(
        {
            "name": "saves",
            "data": {"name": "text", "path": str(text), "tokenizer": "byte"},
            "model": {"name": "language_model", **sizes, "memory": memory},
            "training": {**training, "metric": "bits_per_byte"},
        }
    )
    train, validation = (build_dataset(config, split) for split in ("train", "validation"))
    config, world = fill_from_data(config, train.describe()), World(torch.device(device))
    task = make_task(config, build_model(config).to(device), train, validation, world)
    trainer = _Timed(config, task, folder, world, Reporter("saves", steps, None))
    trainer.stalls = []
    return trainer


def as_markdown(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    head = ["save", "a save keeps training (s)", "whole runs (s)", "a checkpoint (MiB)"]
    return table(head, [[row.way, _spread(row.stalls), _spread(row.whole), f"{row.mebibytes:.0f}"] for row in rows])


def _spread(seconds: Sequence[float]) -> str:
    if not seconds:
        return ""
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})"
