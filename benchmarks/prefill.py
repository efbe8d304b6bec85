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

from benchmarks import command, context, generation, memories
from benchmarks.memory_peers import ModelSizes
from cached_lab.experiments.costs.timing import compare

OURS, WHOLE = "ours", "whole text"


def add_options(parser: argparse.ArgumentParser) -> None:
    generation.add_sizes(parser)
    lengths, models = (128, 256, 512, 1024), "ours or types of transformers (default: ours,llama)"
    parser.add_argument("--memories", default=context.STANDARD, help="names separated by commas, or all")
    parser.add_argument("--models", default="ours,llama", help=models)
    parser.add_argument("--segments", type=command.numbers, default=lengths, help="segment lengths")
    parser.add_argument("--tokens", type=command.positive, default=16384, help="tokens of the text (default: 16384)")
    parser.set_defaults(rounds=3, rows=(1,))


def measure(options: argparse.Namespace) -> command.Result:
    left_out: dict[str, None] = {}
    kinds = itertools.product(options.rows, options.models.split(","))
    rows = [row for count, kind in kinds for row in measure_model(count, kind, options, left_out)]
    columns: dict[str, Callable[[command.Measurement], str]] = {
        **{key: lambda row, key=key: str(row[key]) for key in ("rows", "model", "memory", "segment")},  # type: ignore[misc]
        "tokens/s": lambda row: f"{row['speed']:,.0f}" + (" (best)" if row["best"] else ""),
        f"time, {WHOLE} = 1": lambda row: str(row["time"]),
    }
    text = [command.columns_table(rows, columns), *(f"Left out: {reason}." for reason in left_out)]
    return command.Result(rows, "\n\n".join(text), {**generation.sizes_of(options), "tokens": options.tokens})


def measure_model(
    rows: int, kind: str, options: argparse.Namespace, left_out: dict[str, None]
) -> list[command.Measurement]:
    """Time the whole text, and every memory with every segment length; `left_out` gets the refusals of a host."""
    base, tokens = ModelSizes(**generation.sizes_of(options)), options.tokens
    ids_BN = generation.GenerationSetting(rows, 1, tokens).prompt_BN(base.vocabulary, options.device)
    cases: dict[str, tuple[str, int]] = {WHOLE: (WHOLE, tokens)}
    calls: dict[str, Any] = {WHOLE: partial(context.read, build(kind, None, base, tokens, options), ids_BN, tokens)}
    for memory, segment in itertools.product(generation.chosen(options.memories), options.segments):
        try:
            model = build(kind, memory, dataclasses.replace(base, segment=segment), tokens, options)
        except ValueError as error:
            left_out[f"{memory} in {kind}, {error}"] = None
        else:
            cases[name := f"{memory} {segment}"] = (memory, segment)
            calls[name] = partial(context.read, model, ids_BN, segment)
    times = compare(calls, WHOLE, options.rounds)
    fastest = {memory: min(times[n].seconds for n in cases if cases[n][0] == memory) for memory, _ in cases.values()}
    return [
        {
            **{"rows": rows, "model": kind, "memory": memory, "segment": segment, "time": times[name]},
            "speed": rows * tokens / times[name].seconds,
            "best": name != WHOLE and times[name].seconds == fastest[memory],
        }
        for name, (memory, segment) in cases.items()
    ]


def build(kind: str, memory: str | None, sizes: ModelSizes, length: int, options: argparse.Namespace) -> Any:
    """Build our model, or a host with positions for `length` tokens."""
    spec = None if memory is None else memories.spec(memory, sizes)
    model = memories.build(spec, sizes) if kind == OURS else memories.host(kind, sizes, length, spec)
    return model.to(options.device).eval()


if __name__ == "__main__":
    sys.exit(command.main(sys.modules[__name__]))
