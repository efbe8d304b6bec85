"""Ten ratios of time on small models: a record for later commits, and a check against the newest record.

Every block builds all models again and times them in turn. A row is the mean of the blocks' median ratios with its 95 %
t interval. A ratio has moved if its interval and the record's are apart by more than `DRIFT`, in two measurements.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
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
PLAIN = "plain"
DRIFT = 0.03
"""Ratios of the same code differ by so much between runs, beyond their intervals."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", type=command.positive, default=12, help="default: 12")
    parser.add_argument("--check", action="store_true", help="against the newest record; exit status 1 if one moved")
    parser.set_defaults(rounds=4)


def measure(options: argparse.Namespace) -> command.Result:
    if options.blocks < 2:
        raise ValueError(f"--blocks {options.blocks}: an interval needs two; take at least 2")
    records = [json.loads(file.read_text(encoding="utf-8")) for file in FOLDER.glob("*.json")]
    if options.check and not records:
        raise ValueError(f"--check: {FOLDER.name} has no record; make one by --out {FOLDER.name}/DATE-COMMIT.json")
    rows, settings = ratios(options), {"machine": machine(), "blocks": options.blocks}
    text = command.table([f"time, {PLAIN} = 1", "mean (95 %)"], [[row["ratio"], row["text"]] for row in rows])
    if not options.check:
        return command.Result(rows, text, settings)
    newest = max(records, key=lambda record: str(record["environment"]["date"]))
    then, found = newest["environment"], moved(newest["rows"], rows)
    again = moved(newest["rows"], ratios(options)) if found else {}
    lines = [f"- {name}: {now}" for name, now in found.items() if name in again]
    other = f" on another machine ({then['machine']}; this is {machine()})" if then["machine"] != machine() else ""
    said = f"{len(lines)} of {len(rows)} ratios have moved since {then['date']}, commit {then['commit']}{other}"
    return command.Result(rows, "\n".join([f"{text}\n\n{said}", *lines]), settings, status=int(bool(lines)))


def ratios(options: argparse.Namespace) -> list[command.Measurement]:
    """Measure all ratios."""
    found: dict[str, list[float]] = {}
    for _ in range(options.blocks):
        for work, cases in cases_of(options.device).items():
            for name, ratio in compare(cases, PLAIN, options.rounds).items():
                found.setdefault(f"{work}, {name}", []).append(ratio.median)
    rows = {name: mean_interval(values) for name, values in found.items() if not name.endswith(PLAIN)}
    text = "{:.3f} ({:.3f}-{:.3f})".format
    return [{"ratio": name, **row._asdict(), "text": text(*row)} for name, row in rows.items()]


def cases_of(device: str) -> dict[str, Mapping[str, Callable[[], object]]]:
    """Return training steps and writers of language models by memory, and training steps of an image model."""
    train = {name or PLAIN: our_step(name, SIZES, device, torch.float32) for name in (None, *TRAINED)}
    models = {name: generation.build(name, SIZES, WRITING).to(device) for name in (generation.NO_MEMORY, *WRITTEN)}
    models[PLAIN] = models.pop(generation.NO_MEMORY)
    write = {name: generation.our_writer(model, SIZES, WRITING, device) for name, model in models.items()}
    pictures, labels = image_batch(8, IMAGES[1], device)

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(pictures), labels)

    vits = {name: model.to(device) for name, model in grc.build(*IMAGES, (PLAIN, "GRC")).items()}
    steps = {name: training_step(model, partial(loss, model)) for name, model in vits.items()}
    return {"training": train, "writing": write, "ViT": steps}


def moved(then: Sequence[command.Measurement], now: Sequence[command.Measurement]) -> dict[str, str]:
    """Return the ratios that have moved, each with both intervals."""
    before = {row["ratio"]: row for row in then}
    pairs = [(before[row["ratio"]], row) for row in now if row["ratio"] in before]
    apart = [(a, b) for a, b in pairs if max(b["low"] / a["high"], a["low"] / b["high"]) > 1 + DRIFT]
    return {b["ratio"]: f"{b['text']}, in the record {a['text']}" for a, b in apart}


if __name__ == "__main__":
    sys.exit(command.main(sys.modules[__name__]))
