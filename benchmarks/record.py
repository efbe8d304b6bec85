"""Ten ratios of time on small models: a record for later commits, and a check of what has moved since the newest one.

Every block builds all models again and times them in turn. A row is the mean of the blocks' median ratios, with the 95 %
t interval. A ratio has moved if its interval and the record's are apart by more than `DRIFT`, in two measurements.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import command, generation, grc
from benchmarks.memories import our_step
from benchmarks.memory_peers import ModelSizes
from cached_lab.experiments.costs.throughput import image_batch
from cached_lab.experiments.costs.timing import compare, training_step
from cached_lab.experiments.environment import machine
from cached_lab.experiments.statistics import mean_interval

FOLDER = Path(__file__).with_name("records")
SIZES = ModelSizes(width=128, depth=2, segment=64, segments=2, memory=64)
WRITING = generation.GenerationSetting(rows=4, segment=16, prompt=4, tokens=16)
IMAGES = ("vit_tiny_patch16_224", 112)
TRAINED = ("rmt", "transformer_xl", "grc_stream", "titans", "infini", "compressive")
WRITTEN = ("rmt", "titans", "grc_stream")
DRIFT = 0.03
"""Ratios of the same code differ by so much between runs, beyond their intervals."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", type=command.positive, default=12, help="at least two (default: 12)")
    parser.add_argument("--check", action="store_true", help="against the newest record; exit status 1 if one moved")
    parser.set_defaults(rounds=4)


def measure(options: argparse.Namespace) -> command.Result:
    settings = {"machine": machine(), "blocks": options.blocks}
    records = [json.loads(file.read_text(encoding="utf-8")) for file in FOLDER.glob("*.json")]
    if options.check and not records:
        raise ValueError(f"--check: {FOLDER} has no record; make one by --out {FOLDER.name}/DATE-COMMIT.json")
    rows = ratios(options)
    if not options.check:
        return command.Result(rows, as_markdown(rows), settings)
    newest = max(records, key=lambda record: record["environment"]["date"])
    found = moved(newest["rows"], rows)
    if found:
        again = moved(newest["rows"], ratios(options))
        found = {name: text for name, text in found.items() if name in again}
    then = newest["environment"]
    lines = [f"Record of {then['date']}, commit {then['commit']}: {len(found)} of {len(rows)} ratios have moved."]
    if then["machine"] != machine():
        lines.append(f"The record is of another machine ({then['machine']}, not {machine()}): ratios may differ.")
    lines += [f"- {name}: {text}" for name, text in found.items()]
    return command.Result(rows, "\n\n".join([as_markdown(rows), "\n".join(lines)]), settings, status=int(bool(found)))


def ratios(options: argparse.Namespace) -> list[command.Measurement]:
    """Measure all ratios."""
    found: dict[str, list[float]] = {}
    for _ in range(options.blocks):
        for kind, make in {"training": training, "writing": writing, "ViT": images}.items():
            for name, ratio in compare(make(options.device), "plain", options.rounds).items():
                found.setdefault(f"{kind}, {name}", []).append(ratio.median)
    rows = {name: mean_interval(values) for name, values in found.items() if not name.endswith("plain")}
    return [{"ratio": name, **interval._asdict()} for name, interval in rows.items()]


def training(device: str) -> dict[str, Callable[[], object]]:
    """Return training steps of language models by memory."""
    return {name or "plain": our_step(name, SIZES, device, torch.float32) for name in (None, *TRAINED)}


def writing(device: str) -> dict[str, Callable[[], object]]:
    """Return writers of a segment by memory."""
    models = {"plain": generation.NO_MEMORY, **{name: name for name in WRITTEN}}
    built = {name: generation.build(memory, SIZES, WRITING).to(device) for name, memory in models.items()}
    return {name: generation.our_writer(model, SIZES, WRITING, device) for name, model in built.items()}


def images(device: str) -> dict[str, Callable[[], object]]:
    """Return training steps of an image model, plain and with GRC."""
    pictures, labels = image_batch(8, IMAGES[1], device)
    models = {name: model.to(device) for name, model in grc.build(*IMAGES, ("plain", "GRC")).items()}

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(pictures), labels)

    return {name: training_step(model, partial(loss, model)) for name, model in models.items()}


def moved(then: Sequence[command.Measurement], now: Sequence[command.Measurement]) -> dict[str, str]:
    """Return the ratios that have moved, with the record's interval and the new one."""
    before, found = {row["ratio"]: row for row in then}, {}
    for row in now:
        old = before.get(row["ratio"], row)
        if max(row["low"] / old["high"], old["low"] / row["high"]) > 1 + DRIFT:
            found[row["ratio"]] = f"{interval_text(old)} in the record, {interval_text(row)} now"
    return found


def interval_text(row: command.Measurement) -> str:
    """Write a ratio with its interval."""
    return "{mean:.3f} ({low:.3f}-{high:.3f})".format(**row)


def as_markdown(rows: Sequence[command.Measurement]) -> str:
    """Write the rows as a Markdown table."""
    return command.table(["ratio, plain = 1", "mean (95 %)"], [[row["ratio"], interval_text(row)] for row in rows])


if __name__ == "__main__":
    sys.exit(command.main(sys.modules[__name__]))
