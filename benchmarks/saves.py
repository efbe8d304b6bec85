"""Time that training waits for checkpoints, written at once and in the background, and time of whole runs.

The same run is trained in turn without saves, with `training.save=sync` and with `async`, round by round, in temporary
folders. Seconds are wall time: a save waits for the disk, and a writing thread takes its time from the steps if no core
is free.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from benchmarks import command
from cached_lab.experiments.build import build_dataset, build_model
from cached_lab.tasks.kinds import make_task
from cached_lab.tasks.recipes import config_from_dict, fill_from_data
from cached_lab.training.distributed import World
from cached_lab.training.progress import Reporter
from cached_lab.training.trainer import Trainer

WAYS = ("none", "sync", "async")
STEPS, EVERY = 24, 6
WIDTH, DEPTH = 384, 4


class SaveTimer(Trainer):
    """A trainer that records the seconds of each save."""

    stalls: list[float]

    def save(self) -> None:
        """Save, and record the time."""
        begin = time.perf_counter()
        super().save()
        self.stalls.append(time.perf_counter() - begin)


def measure(options: argparse.Namespace) -> command.Result:
    """Train in every way, `rounds` times each; stalls are those of all saves but the last."""
    found: dict[str, command.Measurement] = {way: {"way": way, "stalls": [], "whole": []} for way in WAYS}
    for index in range(options.rounds):
        for way in WAYS if index % 2 else reversed(WAYS):
            with tempfile.TemporaryDirectory() as folder:
                trainer = build(Path(folder), way, options.device)
                begin = time.perf_counter()
                trainer.fit()
                found[way]["whole"].append(time.perf_counter() - begin)
                found[way]["stalls"] += trainer.stalls[:-1]
                files = [file for file in trainer.checkpoints.paths()[-1].rglob("*") if file.is_file()]
                found[way]["mebibytes"] = sum(file.stat().st_size for file in files) / 2**20
    columns = {
        "save": lambda row: row["way"],
        "a save keeps training (s)": lambda row: spread(row["stalls"]),
        "whole runs (s)": lambda row: spread(row["whole"]),
        "a checkpoint (MiB)": lambda row: f"{row['mebibytes']:.0f}",
    }
    rows = list(found.values())
    return command.Result(rows, command.columns_table(rows, columns))


def build(folder: Path, way: str, device: str) -> SaveTimer:
    """Build a trainer of a small language model on random letters."""
    text = folder / "text"
    text.mkdir()
    letters = np.random.Generator(np.random.PCG64(0)).integers(97, 123, 50_000, dtype=np.uint8)
    for split in ("train", "valid", "test"):
        (text / f"{split}.txt").write_bytes(letters.tobytes())
    training: dict[str, Any] = {"steps": STEPS, "save_every": STEPS if way == "none" else EVERY}
    training |= {"evaluate_every": STEPS, "save": "sync" if way == "none" else way, "device": device}
    training |= {"batch_size": 8, "segment_length": 64, "segments": 2, "bptt": 2, "tensorboard": False}
    sizes = {"width": WIDTH, "depth": DEPTH, "heads": 4, "feed_forward": 4 * WIDTH}
    memory = {"name": "transformer_xl", "length": 64}
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
    trainer = SaveTimer(config, task, folder, world, Reporter("saves", STEPS, None))
    trainer.stalls = []
    return trainer


def spread(seconds: Sequence[float]) -> str:
    """Write the median with the least and the most."""
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})" if seconds else ""


if __name__ == "__main__":
    sys.exit(command.main(sys.modules[__name__]))
