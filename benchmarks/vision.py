"""Cached ViT, PVT, Swin and PVTv2 against the plain models: images a second, peak memory, counted FLOPs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import command
from cached_lab.experiments.costs.throughput import STANDARD, measure_throughput, throughput_table


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--batch", type=command.positive, default=8, help="images in a batch (default: 8)")
    parser.add_argument("--models", default=",".join(STANDARD), help="names separated by commas (default: %(default)s)")
    parser.add_argument("--image-size", type=command.positive, default=224, help="side in pixels (default: 224)")


def measure(options: argparse.Namespace) -> command.Result:
    """Measure the models, plain and with GRC."""
    models, side = options.models.split(","), options.image_size
    rows = measure_throughput(options.batch, options.rounds, options.device, models=models, image_size=side)
    return command.Result(rows, throughput_table(rows), {"batch": options.batch, "image_size": side})


if __name__ == "__main__":
    sys.exit(command.main(sys.modules[__name__]))
