"""GRC against timm's plain model and against the structure of the released code: time, FLOPs, kept activations.

The plain model uses timm's fused attention. Kept activations are the bytes that autograd holds between forward and
backward, parameters not counted.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from cached_transformers.experiments.costs.flops import count_parameters, saved_activation_bytes
from cached_transformers.experiments.reports.markdown import table
from cached_transformers.extras import require
from cached_transformers.integrations.adapters import add_memory
from cached_transformers.memories.parts.shared_cache import caches

from .interleaved import Ratio
from .released_structure import add_released_structure
from .vision import image_batch, timed

MODELS = {"ViT-S/16": "vit_small_patch16_224", "PVTv2-B0": "pvt_v2_b0"}
SIDE = 224


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


def build(architecture: str) -> dict[str, nn.Module]:
    """The plain model, ours with GRC, and the released structure, from the same weights."""
    timm = require("timm", extra="vision")
    torch.manual_seed(0)
    plain = timm.create_model(architecture)
    return {
        "plain": plain,
        "GRC": add_memory(copy.deepcopy(plain), "grc", ratio=0.5),
        "released structure": add_released_structure(copy.deepcopy(plain)),
    }


def measure(
    name: str, architecture: str, batch: int, rounds: int, device: str, compiled: bool, dtype: torch.dtype
) -> list[Row]:
    """All rows of one model."""
    models = {case: model.to(device) for case, model in build(architecture).items()}
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
    head = "model | case | parameters (M) | train FLOPs | inference FLOPs | train step | inference | kept activations"
    cells = [
        [
            r.model,
            r.case,
            f"{r.parameters / 1e6:.2f}",
            f"{r.train_flops_ratio:.3f}x",
            f"{r.inference_flops_ratio:.3f}x",
            *(str(t) if r.case != "plain" else f"1 ({t.seconds:.2f} s)" for t in (r.train, r.inference)),
            f"{r.activations_mib:.0f} MiB ({r.activations_ratio:.3f}x)",
        ]
        for r in rows
    ]
    return table(head.split(" | "), cells)
