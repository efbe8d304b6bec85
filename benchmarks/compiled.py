"""torch.compile beside eager execution: time of training and reading, compile time, graphs, other lengths.

Language models with a memory read a text in segments; a ViT-S with GRC reads images. The compiler's cache is off.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from benchmarks import command, grc, memories
from benchmarks.memory_peers import ModelSizes
from cached_lab.experiments.costs.throughput import image_batch
from cached_lab.experiments.costs.timing import compare, training_step
from cached_transformers.loops.segments import SegmentLoop

VIT = "ViT-S/16 with grc"
Work = Callable[[int, bool], None]
WARM = 3
"""Calls until every graph is there: of a fresh, an attached and a detached state."""


def add_options(parser: argparse.ArgumentParser) -> None:
    cases = f"grc_stream,rmt,transformer_xl,titans,{VIT}"
    parser.add_argument("--cases", default=cases, help=f"memories, or {VIT!r}, separated by commas")
    parser.add_argument("--depth", type=command.positive, default=2, help="layers of a language model (default: 2)")
    parser.add_argument("--lengths", type=command.numbers, default=(512, 450, 300, 130, 77), help="the first is timed")


def measure(options: argparse.Namespace) -> command.Result:
    """Measure every case. Compile times are CPU seconds of all processes."""
    uncached = {"force_disable_caches": True, "compile_threads": 1}
    with torch._inductor.config.patch(uncached):  # type: ignore[no-untyped-call]
        rows = [measure_case(case, options) for case in options.cases.split(",")]
    columns: dict[str, Callable[[command.Measurement], str]] = {
        "model": lambda row: row["case"],
        "training step, eager = 1": lambda row: str(row["train"]),
        "reading, eager = 1": lambda row: str(row["read"]),
        "compile time (s)": lambda row: f"{row['seconds']:.0f}",
        "graphs": lambda row: str(row["graphs"]),
        "breaks": lambda row: str(row["breaks"]),
        "new graphs at other lengths": lambda row: ", ".join(str(graphs) for graphs, _ in row["others"]) or "-",
        "their compile time (s)": lambda row: ", ".join(f"{seconds:.0f}" for _, seconds in row["others"]) or "-",
    }
    settings = {"depth": options.depth, "lengths": list(options.lengths)}
    return command.Result(rows, command.columns_table(rows, columns), settings)


def measure_case(case: str, options: argparse.Namespace) -> command.Measurement:
    """Measure one model: the first calls, warm calls, and the first calls at other lengths."""
    torch._dynamo.reset()
    counters.clear()
    make = partial(image_work, options.device) if case == VIT else partial(text_work, case, options)
    eager, compiled = make(lambda model: model), make(torch.compile)
    length, *others = [options.lengths[0]] if case == VIT else options.lengths

    def first_calls(length: int) -> tuple[int, float]:
        before, started = counters["stats"]["unique_graphs"], sum(os.times()[:4])
        for training in (True, False):
            for _ in range(WARM):
                compiled(length, training)
        return counters["stats"]["unique_graphs"] - before, sum(os.times()[:4]) - started

    graphs, seconds = first_calls(length)
    row: command.Measurement = {"case": case, "graphs": graphs, "seconds": seconds}
    for name, training in (("train", True), ("read", False)):
        both = {"eager": partial(eager, length, training), "compiled": partial(compiled, length, training)}
        row[name] = compare(both, "eager", options.rounds)["compiled"]
    row["others"] = [first_calls(other) for other in others]
    return {**row, "breaks": sum(counters["graph_break"].values())}


def text_work(memory: str, options: argparse.Namespace, wrap: Callable[[nn.Module], Any]) -> Work:
    """Read a text of some length on from the last state, in training or without a gradient."""
    sizes = dataclasses.replace(ModelSizes(), depth=options.depth)
    model = memories.build(memories.spec(memory, sizes), sizes).to(options.device)
    loop = SegmentLoop(wrap(model), sizes.segment, bptt=sizes.segments if memory in memories.ACROSS else 1)
    tokens, state = memories.random_tokens(sizes).to(options.device), None

    def loss(length: int) -> Tensor:
        nonlocal state
        value, state = loop(tokens[:, :length], tokens[:, 1 : length + 1], state)
        return value  # type: ignore[no-any-return]

    return work_of(model, loss)


def image_work(device: str, wrap: Callable[[nn.Module], Any]) -> Work:
    """Classify a batch of images."""
    model = grc.build(grc.MODELS["ViT-S/16"], grc.SIDE, ["GRC"])["GRC"].to(device)
    run, (images, labels) = wrap(model), image_batch(4, grc.SIDE, device)
    return work_of(model, lambda length: F.cross_entropy(run(images), labels))


def work_of(model: nn.Module, loss: Callable[[int], Tensor]) -> Work:
    """Return a function that makes a training step, or computes the loss in evaluation."""

    length = 0
    step = training_step(model, lambda: loss(length))

    def work(tokens: int, training: bool) -> None:
        nonlocal length
        length = tokens
        if training:
            step()
        else:
            with torch.no_grad():
                model.eval()
                loss(length)

    return work


if __name__ == "__main__":
    sys.exit(command.main(sys.modules[__name__]))
