"""Reading a long text: memories in segments beside attention to the whole text, in our models and in hosts.

Each model reads the same random tokens without gradient, up to the logits of the last one. The whole text is one
segment of the model without a memory, with PyTorch's fused causal attention.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import command, generation, memories
from benchmarks.context import STANDARD
from benchmarks.memory_peers import ModelSizes
from cached_lab.experiments.costs.timing import compare

WHOLE = "whole text"


def add_options(parser: argparse.ArgumentParser) -> None:
    generation.add_sizes(parser)
    lengths = (128, 256, 512, 1024)
    parser.add_argument("--memories", default=STANDARD, help="names separated by commas, or all")
    parser.add_argument("--models", default="ours,llama", help="ours, or types of transformers")
    parser.add_argument("--segments", type=command.numbers, default=lengths, help="segment lengths")
    parser.add_argument("--tokens", type=command.positive, default=16384, help="tokens of the text (default: 16384)")
    parser.set_defaults(rounds=3)


def measure(options: argparse.Namespace) -> command.Result:
    left_out: list[str] = []
    rows = [row for kind in options.models.split(",") for row in measure_model(kind, options, left_out)]
    columns: dict[str, Callable[[command.Measurement], str]] = {
        "model": lambda row: row["model"],
        "memory": lambda row: row["memory"],
        "segment": lambda row: f"{row['segment']:,}",
        "tokens/s": lambda row: f"{row['speed']:,.0f}" + " (best)" * row["best"],
        f"time, {WHOLE} = 1": lambda row: str(row["time"]),
    }
    text = command.with_missing(command.columns_table(rows, columns), left_out)
    return command.Result(rows, text, {**generation.sizes_of(options), "tokens": options.tokens})


def measure_model(kind: str, options: argparse.Namespace, left_out: list[str]) -> list[command.Measurement]:
    """Time the whole text, and every memory with every segment length; `left_out` gets the refusals of a host."""
    base, tokens = ModelSizes(**generation.sizes_of(options)), options.tokens
    ids_1N = generation.GenerationSetting(1, 1, tokens).prompt_BN(base.vocabulary, options.device)
    calls: dict[str, Any] = {}
    for memory, segment in [(WHOLE, tokens), *itertools.product(generation.chosen(options.memories), options.segments)]:
        sizes = dataclasses.replace(base, segment=segment)
        spec = None if memory == WHOLE else memories.spec(memory, sizes)
        try:
            model = memories.build(spec, sizes) if kind == "ours" else memories.host(kind, sizes, tokens, spec)
        except ValueError as error:
            if memory == WHOLE:
                raise
            left_out.append(f"{memory} in {kind}, {error}")
        else:
            calls[f"{memory}, {segment}"] = partial(memories.read, model.to(options.device).eval(), ids_1N, segment)
    times, found = compare(calls, f"{WHOLE}, {tokens}", options.rounds), []
    for name, time in times.items():
        memory, _, segment = name.partition(", ")
        best = memory != WHOLE and time.seconds == min(times[n].seconds for n in times if n.startswith(f"{memory},"))
        row = {"model": kind, "memory": memory, "segment": int(segment), "speed": tokens / time.seconds}
        found.append({**row, "time": time, "best": best})
    return found


if __name__ == "__main__":
    sys.exit(command.main(sys.modules[__name__]))
