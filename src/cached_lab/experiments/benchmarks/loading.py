"""Whether data loading keeps up: images a second from the loader, by augmentation and workers, beside what models take.

A model is fed when the loader gives more images a second than a training step consumes. Loader and model are timed one
after the other, so on a machine whose cores also compute the model, the time of both adds up; `workers needed` says how
many loading processes one fast device would want.

The images are photographs where a folder or archive is given, else made JPEG files of 500 x 375 pixels, the usual size
of those of ImageNet, with as many bytes (some 110 kB).
"""

from __future__ import annotations

import io
import itertools
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from cached_lab.experiments.reports.markdown import table
from cached_lab.tasks.classification.images.class_folders import ImageFolder
from cached_lab.training.loader import TrainingOrder, training_batches
from cached_transformers.extras import require
from cached_transformers.integrations.models import create_model

from .interleaved import training_step

SIZE = (500, 375)
PIPELINES: dict[str, dict[str, Any] | None] = {
    "decode, resize, centre": None,
    "random crop, mirror": {},
    "the same, RandAugment, erasing": {"auto_augment": "rand-m9-mstd0.5-inc1", "erase": 0.25},
}
MODELS = ("deit_small_patch16_224", "pvt_tiny")


@dataclass(frozen=True)
class Row:
    """One measurement: median images a second, with the least and most over the rounds.

    Attributes:
        what: a pipeline of the loader, or a model's training step.
        workers: loading processes; None for a model.
    """

    what: str
    workers: int | None
    images_per_second: float
    low: float
    high: float


def run(
    rounds: int, batch: int = 32, workers: Sequence[int] = (0, 1, 2), device: str = "cpu", path: str | None = None
) -> list[Row]:
    """Measure every pipeline with every number of workers, and a training step of the models.

    Args:
        rounds: counted batches of each. batch: images in one. path: an image folder or archive; None makes images.
    """
    if min(workers) < 0:
        raise ValueError(f"workers {list(workers)} must not be negative")
    with tempfile.TemporaryDirectory() as made:
        root = Path(path).expanduser() if path is not None else make_images(Path(made), max(64, batch))
        rows = [
            _loader(name, root, options, count, batch, rounds)
            for name, options in PIPELINES.items()
            for count in workers
        ]
    return rows + [_model(name, batch, max(1, rounds // 4), device) for name in MODELS]


def make_images(root: Path, count: int, size: tuple[int, int] = SIZE) -> Path:
    """`count` JPEG files of two classes below `root`: smooth colours with fine noise, as dense as photographs."""
    image_module = require("PIL.Image", extra="vision")
    generator = np.random.default_rng(0)
    for index in range(count):
        coarse = generator.integers(0, 256, (size[1] // 25, size[0] // 25, 3), dtype=np.uint8)
        smooth = np.asarray(
            image_module.fromarray(coarse).resize(size, image_module.Resampling.BICUBIC), dtype=np.float64
        )
        noisy = np.clip(smooth + generator.normal(0, 14, smooth.shape), 0, 255).astype(np.uint8)
        buffer = io.BytesIO()
        image_module.fromarray(noisy).save(buffer, "JPEG", quality=85)
        file = root / f"class{index % 2}" / f"{index:04}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(buffer.getvalue())
    return root


def _loader(name: str, root: Path, options: dict[str, Any] | None, workers: int, batch: int, rounds: int) -> Row:
    data = ImageFolder(
        "train",
        path=root,
        augment=options is not None,
        augmentation=options,
        crop_ratio=0.875,
        validation_fraction=0,
        test_fraction=0,
    )
    if len(data) < batch:
        raise ValueError(f"{root} has {len(data)} training images, fewer than a batch of {batch}; give --batch")
    batches = training_batches(data, TrainingOrder(len(data), batch, seed=0), workers)
    # What the workers have made ahead by the time the clock starts would be counted as if it took no time.
    ahead = 2 * workers + 1
    for _ in range(ahead):
        next(batches)
    marks = [time.perf_counter()]
    for _ in range(rounds):
        next(batches)
        marks.append(time.perf_counter())
    batches.close()  # type: ignore[attr-defined]  # a generator, whose workers end with it
    if workers:  # batches arrive in bursts, one from each worker, so only the whole time says anything
        rate = batch * rounds / (marks[-1] - marks[0])
        return Row(name, workers, rate, rate, rate)
    return _row(name, workers, [batch / (after - before) for before, after in itertools.pairwise(marks)])


def _model(name: str, batch: int, rounds: int, device: str) -> Row:
    torch.manual_seed(0)
    model = create_model("timm", architecture=name, classes=1000).to(device)
    inputs_BCHW = torch.randn(batch, 3, 224, 224, device=device)
    targets_B = torch.arange(batch, device=device) % 1000
    step = training_step(model, lambda: F.cross_entropy(model(inputs_BCHW).outputs, targets_B))
    rates = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        rates.append(batch / (time.perf_counter() - begin))
    return _row(f"training step of {name}", None, rates[1:])


def _row(what: str, workers: int | None, rates: list[float]) -> Row:
    return Row(what, workers, statistics.median(rates), min(rates), max(rates))


def as_markdown(rows: Sequence[Row]) -> str:
    """Two Markdown tables: the loader's rates, and for each model the workers that would feed it."""
    loading = [row for row in rows if row.workers is not None]
    models = [row for row in rows if row.workers is None]
    counts = sorted({row.workers for row in loading if row.workers is not None})
    names = list(dict.fromkeys(row.what for row in loading))
    rates = {(row.what, row.workers): row.images_per_second for row in loading}
    speeds = [[name, *(f"{rates[name, n]:,.0f}" for n in counts)] for name in names]
    wanted = []
    for row in models:
        needed = [str(math.ceil(row.images_per_second / rates[name, min(counts)])) for name in names]
        wanted.append([row.what, f"{row.images_per_second:,.1f}", *needed])
    above = table(["images a second", *(f"{n} workers" for n in counts)], speeds)
    return above + "\n\n" + table(["takes", "images a second", *(f"workers needed: {n}" for n in names)], wanted)
