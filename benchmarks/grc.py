"""GRC in image models against timm's plain model and the structure of the released code: time, FLOPs, activations.

The plain model uses timm's fused attention. Kept activations are the bytes that autograd holds between forward and
backward, without parameters.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import command
from benchmarks.released_structure import add_released_structure
from cached_lab.experiments.costs.flops import saved_activation_bytes
from cached_lab.experiments.costs.throughput import image_batch, measure_cases
from cached_transformers.extras import require
from cached_transformers.integrations.adapters import add_memory

MODELS = {"ViT-S/16": "vit_small_patch16_224", "PVTv2-B0": "pvt_v2_b0"}
SIDE = 224
RATIO = 0.5
CASES: Mapping[str, Callable[[nn.Module, int], nn.Module]] = {
    "plain": lambda model, side: model,
    "GRC": lambda model, side: add_memory(model, "grc", ratio=RATIO, input_size=(side, side)),
    "GRC, a quarter of the slots": lambda model, side: add_memory(
        model, "grc", ratio=RATIO, input_size=(side, side), stride=2, interpolation="area"
    ),
    "released structure": lambda model, side: add_released_structure(model),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--batch", type=command.positive, default=8, help="images in a batch (default: 8)")
    parser.add_argument("--compile", action="store_true", help="time every model through torch.compile")
    command.add_dtype(parser, "of autocast")


def measure(options: argparse.Namespace) -> command.Result:
    """Measure every model of `MODELS` in every case."""
    rows = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torchvision")
        for name, architecture in MODELS.items():
            rows += measure_model(name, architecture, options)
    settings = {name: getattr(options, name) for name in ("batch", "compile", "dtype")}
    return command.Result(rows, as_markdown(rows), settings)


def build(architecture: str, side: int, cases: Iterable[str]) -> dict[str, nn.Module]:
    """Build the model of each case from the same weights, for square images of `side` pixels.

    The released structure requires images of 224 x 224 pixels.
    """
    timm = require("timm", extra="vision")
    torch.manual_seed(0)
    plain = timm.create_model(architecture, **({} if "pvt_v2" in architecture else {"img_size": side}))
    return {case: CASES[case](copy.deepcopy(plain), side) for case in cases}


def measure_model(name: str, architecture: str, options: argparse.Namespace) -> list[command.Measurement]:
    """Measure one model in all cases; ratios are to the plain model."""
    models = {case: model.to(options.device) for case, model in build(architecture, SIDE, CASES).items()}
    images, labels = image_batch(options.batch, SIDE, options.device)

    def kept_bytes(model: nn.Module) -> int:
        def loss() -> Tensor:
            return F.cross_entropy(model(images), labels)

        return saved_activation_bytes(loss, model.train(), images, labels)

    kept = {case: kept_bytes(model) for case, model in models.items()}
    dtype = command.dtype_of(options)
    rows = measure_cases(models, images, labels, options.rounds, compiled=options.compile, dtype=dtype)
    for row in rows:
        activations = kept[row["case"]]
        row |= {"model": name, "activations_mib": activations / 2**20}
        row["activations_ratio"] = activations / kept["plain"]
    return rows


def as_markdown(rows: list[command.Measurement]) -> str:
    """Write the rows as a Markdown table."""
    head = ["model", "case", "parameters (M)", "train FLOPs", "inference FLOPs"]
    head += ["train step", "fastest", "inference", "fastest", "kept activations"]
    cells = []
    for row in rows:
        line = [row["model"], row["case"], f"{row['parameters'] / 1e6:.2f}"]
        line += [f"{row[f'{mode}_flops_ratio']:.3f}x" for mode in ("train", "inference")]
        for time in (row["train"], row["inference"]):
            plain = row["case"] == "plain"
            line += [f"1 ({time.seconds:.2f} s)", "1"] if plain else command.fastest(time, False)
        cells.append([*line, f"{row['activations_mib']:.0f} MiB ({row['activations_ratio']:.3f}x)"])
    return command.table(head, cells)


if __name__ == "__main__":
    sys.exit(command.main(sys.modules[__name__]))
