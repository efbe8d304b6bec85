"""GRC against timm's plain model and against the structure of the released code: time, FLOPs, kept activations.

The plain model uses timm's fused attention. Kept activations are the bytes that autograd holds between forward and
backward, parameters not counted.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from cached_lab.experiments.costs.flops import count_parameters, saved_activation_bytes
from cached_lab.experiments.reports.markdown import table
from cached_transformers.extras import require
from cached_transformers.integrations.adapters import add_memory
from cached_transformers.memories.grc.shared_cache import caches

from .interleaved import Ratio
from .released_structure import add_released_structure
from .vision import image_batch, timed

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


@dataclass(frozen=True)
class Row:
    """Measurements of one case; ratios are to the plain model."""

    model: str
    case: str
    parameters: int
    train_gflops: float
    train_flops_ratio: float
    inference_flops_ratio: float
    train: Ratio
    inference: Ratio
    activations_mib: float
    activations_ratio: float
    cache_kib: float


def build(architecture: str, side: int, cases: Iterable[str]) -> dict[str, nn.Module]:
    """The model of each case, from the same weights, for images of `side` x `side` pixels.

    The released structure is made for images of 224 x 224.
    """
    timm = require("timm", extra="vision")
    torch.manual_seed(0)
    plain = timm.create_model(architecture, **({} if "pvt_v2" in architecture else {"img_size": side}))
    return {case: CASES[case](copy.deepcopy(plain), side) for case in cases}


def measure(
    name: str, architecture: str, batch: int, rounds: int, device: str, compiled: bool, dtype: torch.dtype
) -> list[Row]:
    """All rows of one model."""
    models = {case: model.to(device) for case, model in build(architecture, SIDE, CASES).items()}
    images, labels = image_batch(batch, SIDE, device)
    kept = {case: _kept(model.train(), images, labels) for case, model in models.items()}
    found = timed(models, images, labels, rounds, compiled, dtype=dtype)
    return [
        Row(
            name,
            case,
            count_parameters(model),
            found.train_flops[case] / 1e9,
            found.train_flops[case] / found.train_flops["plain"],
            found.flops[case] / found.flops["plain"],
            found.train[case],
            found.inference[case],
            kept[case] / 2**20,
            kept[case] / kept["plain"],
            sum(c.cache_MC.numel() * c.cache_MC.element_size() for c in caches(model)) / 2**10,
        )
        for case, model in models.items()
    ]


def _kept(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> int:
    return saved_activation_bytes(lambda: F.cross_entropy(model(images), labels), model, images, labels)


def run(batch: int, rounds: int, device: str, compiled: bool = False, dtype: torch.dtype = torch.float32) -> list[Row]:
    """Measure every model of `MODELS`.

    Args:
        batch: images in a batch. rounds: counted rounds of training (inference takes three times as many).
        compiled: time all of them through `torch.compile` (FLOPs and kept activations are those of eager mode).
        dtype: of autocast while time is taken; float32 for none.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torchvision")
        found = [measure(name, arch, batch, rounds, device, compiled, dtype) for name, arch in MODELS.items()]
    return [row for rows in found for row in rows]


def as_markdown(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    head = (
        "model | case | parameters (M) | train FLOPs | inference FLOPs | train step | fastest | inference | fastest | "
        "kept activations"
    )
    cells = [
        [
            r.model,
            r.case,
            f"{r.parameters / 1e6:.2f}",
            f"{r.train_flops_ratio:.3f}x",
            f"{r.inference_flops_ratio:.3f}x",
            *(cell for t in (r.train, r.inference) for cell in _times(t, r.case == "plain")),
            f"{r.activations_mib:.0f} MiB ({r.activations_ratio:.3f}x)",
        ]
        for r in rows
    ]
    return table(head.split(" | "), cells)


def _times(ratio: Ratio, plain: bool) -> tuple[str, str]:
    """The ratio with its quartiles, and that of the fastest rounds, which a busy machine moves less."""
    return (f"1 ({ratio.seconds:.2f} s)", "1") if plain else (str(ratio), f"{ratio.fastest:.3f}x")
