"""Segments along diagonals against one segment at a time, with memories inside the layers.

Diagonals save calls: one call of G stacked blocks replaces G calls. They can win if a segment of one row is too little
work for the machine; they cost stacked weights and states, and matrix products without a fused bias.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from benchmarks import command
from benchmarks.memories import build, random_tokens
from benchmarks.memory_peers import ModelSizes
from cached_lab.experiments.costs.timing import compare, training_step
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.models.diagonal import SCHEDULES

DEPTHS, WIDTHS = (4, 8), (64, 256)
BASE = ModelSizes(segments=16, rows=1)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--memories", default="transformer_xl,grc_stream", help="names separated by commas")
    parser.add_argument("--lengths", type=command.numbers, default=(16, 64), help="segment lengths (default: 16,64)")


def measure(options: argparse.Namespace) -> command.Result:
    """Measure every memory with every depth, width and segment length."""
    sizes = itertools.product(options.memories.split(","), DEPTHS, WIDTHS, options.lengths)
    rows = [measure_size(*size, options.rounds, options.device) for size in sizes]
    names = {"memory": "memory", "layers": "depth", "width": "width", "segment": "segment"}
    names |= {"training step, diagonal = 1": "step", "without gradient, diagonal = 1": "forward"}
    cells = [[str(row[name]) for name in names.values()] for row in rows]
    return command.Result(rows, command.table(list(names), cells))


def measure_size(
    memory: str, depth: int, width: int, segment: int, rounds: int, device: str = "cpu"
) -> command.Measurement:
    """Time both orders of one model, whose memory has as many slots as a segment has tokens.

    Ratios are the time of one segment at a time over the time of diagonals: above 1 diagonals are faster. A training
    step has the gradient across all segments if the memory passes one on.
    """
    sizes = dataclasses.replace(BASE, depth=depth, width=width, segment=segment)
    model = build({"name": memory, "length": segment}, sizes).to(device)
    tokens = random_tokens(sizes).to(device)
    loops = {name: SegmentLoop(model, segment, sizes.segments, schedule=name) for name in SCHEDULES}

    def loss(loop: nn.Module) -> Tensor:
        return loop(tokens[:, :-1], tokens[:, 1:])[0]  # type: ignore[no-any-return]

    steps = {name: training_step(model, partial(loss, loop)) for name, loop in loops.items()}
    step = compare(steps, "diagonal", rounds)["segments"]
    model.eval()
    reads = {name: partial(torch.no_grad()(loss), loop) for name, loop in loops.items()}
    forward = compare(reads, "diagonal", rounds)["segments"]
    sized = {"memory": memory, "depth": depth, "width": width, "segment": segment}
    return {**sized, "step": step, "forward": forward}


if __name__ == "__main__":
    sys.exit(command.main(sys.modules[__name__]))
