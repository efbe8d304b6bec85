"""Images a second from the data loader, by augmentation and workers, against the images that training steps consume.

A loader keeps up when it gives more images a second than a training step consumes. Loader and model are timed one after
the other; on a machine whose cores also compute the model, the two times add up. `workers needed` is the number of
loading processes that one fast device needs.

Images come from a folder or archive, or are JPEG files made with the usual size of ImageNet's (500 x 375 pixels, some
110 kB).
"""

from __future__ import annotations

import argparse
import io
import itertools
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch.nn import functional as F

from benchmarks import command
from cached_lab.experiments.costs.timing import training_step
from cached_lab.experiments.reports.markdown import table
from cached_lab.tasks.classification.images.class_folders import ImageFolder
from cached_lab.training.loader import TrainingOrder, training_batches
from cached_transformers.extras import require
from cached_transformers.integrations.models import create_model

PIPELINES: dict[str, dict[str, Any] | None] = {
    "decode, resize, centre": None,
    "random crop, mirror": {},
    "the same, RandAugment, erasing": {"auto_augment": "rand-m9-mstd0.5-inc1", "erase": 0.25},
}
MODELS = ("deit_small_patch16_224", "pvt_tiny")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--batch", type=command.positive, default=8, help="images in a batch (default: 8)")
    parser.add_argument("--workers", type=workers, default=(0, 1, 2), help="numbers of processes (default: 0,1,2)")
    parser.add_argument("--path", help="an image folder or archive (default: made images of 500 x 375 pixels)")


def workers(text: str) -> tuple[int, ...]:
    """Parse numbers of loading processes, separated by commas."""
    counts = tuple(int(part) for part in text.split(","))
    if min(counts) < 0:
        raise argparse.ArgumentTypeError(f"{text} must not be negative")
    return counts


def measure(options: argparse.Namespace) -> command.Result:
    """Measure every pipeline with every number of workers, and a training step of the models."""
    batch, rounds = options.batch, options.rounds
    with tempfile.TemporaryDirectory() as made:
        root = Path(options.path).expanduser() if options.path else make_images(Path(made), max(64, batch))
        rows = [
            {"what": name, "workers": count, **loader_rate(root, PIPELINES[name], count, batch, rounds)}
            for name in PIPELINES
            for count in options.workers
        ]
    for name in MODELS:
        rates = model_rate(name, batch, max(1, rounds // 4), options.device)
        rows.append({"what": f"training step of {name}", "workers": None, **rates})
    return command.Result(rows, as_markdown(rows), {"batch": batch, "cores": os.cpu_count()})


def make_images(root: Path, count: int, size: tuple[int, int] = (500, 375)) -> Path:
    """Write `count` JPEG files of two classes: smooth colours with fine noise, as dense as photographs."""
    image_module = require("PIL.Image", extra="vision")
    generator = np.random.default_rng(0)
    for index in range(count):
        coarse = generator.integers(0, 256, (size[1] // 25, size[0] // 25, 3), dtype=np.uint8)
        enlarged = image_module.fromarray(coarse).resize(size, image_module.Resampling.BICUBIC)
        smooth = np.asarray(enlarged, dtype=np.float64)
        noisy = np.clip(smooth + generator.normal(0, 14, smooth.shape), 0, 255).astype(np.uint8)
        buffer = io.BytesIO()
        image_module.fromarray(noisy).save(buffer, "JPEG", quality=85)
        file = root / f"class{index % 2}" / f"{index:04}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(buffer.getvalue())
    return root


def loader_rate(root: Path, options: dict[str, Any] | None, workers: int, batch: int, rounds: int) -> dict[str, float]:
    """Time the loader: median, least and most images a second."""
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
    for _ in range(2 * workers + 1):  # batches made ahead before the clock starts would count as free
        next(batches)
    marks = [time.perf_counter()]
    for _ in range(rounds):
        next(batches)
        marks.append(time.perf_counter())
    batches.close()  # type: ignore[attr-defined]  # ends the workers of the generator
    if workers:  # batches arrive in bursts, one from each worker: only the whole time is meaningful
        return rates_of([batch * rounds / (marks[-1] - marks[0])])
    return rates_of([batch / (after - before) for before, after in itertools.pairwise(marks)])


def model_rate(name: str, batch: int, rounds: int, device: str) -> dict[str, float]:
    """Time training steps of a model: median, least and most images a second."""
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
    return rates_of(rates[1:])


def rates_of(rates: list[float]) -> dict[str, float]:
    """Summarise images a second over rounds."""
    return {"images_per_second": statistics.median(rates), "low": min(rates), "high": max(rates)}


def as_markdown(rows: list[command.Measurement]) -> str:
    """Write two tables: the loader's rates, and the workers that would feed each model."""
    rates = {(row["what"], row["workers"]): row["images_per_second"] for row in rows if row["workers"] is not None}
    names, counts = list(dict.fromkeys(name for name, _ in rates)), sorted({count for _, count in rates})
    speeds = [[name, *(f"{rates[name, count]:,.0f}" for count in counts)] for name in names]
    wanted = []
    for row in rows:
        if row["workers"] is None:
            speed = row["images_per_second"]
            needed = [str(math.ceil(speed / rates[name, min(counts)])) for name in names]
            wanted.append([row["what"], f"{speed:,.1f}", *needed])
    above = table(["images a second", *(f"{count} workers" for count in counts)], speeds)
    return above + "\n\n" + table(["takes", "images a second", *(f"workers needed: {n}" for n in names)], wanted)


if __name__ == "__main__":
    sys.exit(command.main(sys.modules[__name__]))
