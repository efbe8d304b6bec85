"""Throughput of image models with GRC against the plain models: images a second, peak memory, counted FLOPs.

Inference runs with folded caches and without gradient. Plain models are timm's with fused attention, and our PVT,
which timm lacks. FLOPs are counted on the forward pass, attention products included; the backward pass takes about
twice as many in both. This is table 9 of arXiv:2312.12742, which gives throughput on a V100.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_lab.experiments.reports.markdown import table
from cached_transformers.integrations.adapters import add_memory
from cached_transformers.integrations.models import TimmModel
from cached_transformers.memories.grc.shared_cache_memory import SharedCacheMemory
from cached_transformers.registry import unknown_name

from .flops import count_flops, count_parameters
from .live_bytes import peak_bytes
from .timing import compare, precision, training_step

MODELS = {
    "ViT-S": "vit_small_patch16_224",
    "DeiT-S": "deit_small_patch16_224",
    "PVT-Tiny": "pvt_tiny",
    "PVT-Small": "pvt_small",
    "PVT-Medium": "pvt_medium",
    "Swin-T": "swin_tiny_patch4_window7_224",
    "PVTv2-B2": "pvt_v2_b2",
    "PVTv2-B3": "pvt_v2_b3",
    "PVTv2-B4": "pvt_v2_b4",
}
STANDARD = ("ViT-S", "PVT-Tiny", "Swin-T", "PVTv2-B2")
"""Models measured by default."""
CASES: Mapping[str, dict[str, Any] | None] = {
    "plain": None,
    "GRC": {"variant": "algorithm1"},
    "GRC, released variant": {"variant": "released"},
}


def build_backbones(architecture: str, image_size: int) -> dict[str, nn.Module]:
    """Build the model of each case of `CASES` from the same weights, for square images of `image_size` pixels."""
    torch.manual_seed(0)
    sized: dict[str, Any] = {} if "pvt_v2" in architecture else {"img_size": image_size}
    plain = TimmModel(architecture, **sized).model
    models = {case: copy.deepcopy(plain) for case in CASES}
    for case, options in CASES.items():
        if options is not None:
            add_memory(models[case], "grc", **options, input_size=(image_size, image_size))
    return models


def image_batch(batch: int, side: int, device: str) -> tuple[Tensor, Tensor]:
    """Return random images and labels, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, side, side, generator=generator).to(device)
    return images, torch.randint(0, 1000, (batch,), generator=generator).to(device)


def measure_cases(
    models: Mapping[str, nn.Module],
    images: Tensor,
    labels: Tensor,
    rounds: int,
    *,
    compiled: bool = False,
    dtype: torch.dtype = torch.float32,
) -> list[dict[str, Any]]:
    """Count and time training steps, then inference with folded caches; the models stay in evaluation mode.

    Args:
        models: by case, with one called "plain".
        rounds: counted rounds of training; inference takes three times as many.
        compiled: time every model through `torch.compile`; peak memory is not measured then.
        dtype: autocast dtype; float32 for none.

    Returns:
        a row for each case. `train` and `inference` are `Ratio`s to the plain model, peaks are MiB beyond the weights.
    """
    device = images.device.type
    calls = {case: torch.compile(model) if compiled else model for case, model in models.items()}
    rows: dict[str, dict[str, Any]] = {
        case: {"case": case, "parameters": count_parameters(model)} for case, model in models.items()
    }

    def loss(case: str) -> Tensor:
        with precision(device, dtype):
            return F.cross_entropy(calls[case](images), labels)

    @torch.no_grad()
    def infer(case: str) -> None:
        with precision(device, dtype):
            calls[case](images)

    def measure(kind: str, mode: str, work: Mapping[str, Callable[[], object]], rounds: int) -> None:
        flops = {case: count_flops(model, images, mode=mode) for case, model in models.items()}
        times = compare(work, "plain", rounds)
        for case, row in rows.items():
            row |= {kind: times[case], f"{kind}_images": len(images) / times[case].seconds}
            row[f"{kind}_flops_ratio"] = flops[case] / flops["plain"]
            row[f"{kind}_peak_mib"] = math.nan if compiled else peak_bytes(work[case], device) / 2**20

    measure("train", "train", {c: training_step(m, partial(loss, c)) for c, m in models.items()}, rounds)
    for model in models.values():
        for memory in model.eval().modules():
            if isinstance(memory, SharedCacheMemory) and memory.cache.constant_in_evaluation:
                memory.fold()  # the keys and values of caches become constants
    measure("inference", "eval", {case: partial(infer, case) for case in models}, 3 * rounds)
    return list(rows.values())


def measure_throughput(
    batch: int, rounds: int, device: str, *, models: Sequence[str] = STANDARD, image_size: int = 224
) -> list[dict[str, Any]]:
    """Measure some of `MODELS`, plain and with both forms of GRC: `measure_cases` with "model" in each row.

    Raises:
        ValueError: an unknown model.
    """
    for name in models:
        if name not in MODELS:
            raise ValueError(unknown_name("image model of the benchmark", name, list(MODELS)))
    images, labels = image_batch(batch, image_size, device)
    rows: list[dict[str, Any]] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torchvision")
        for name in models:
            built = {case: m.to(device) for case, m in build_backbones(MODELS[name], image_size).items()}
            rows += [{"model": name, **row} for row in measure_cases(built, images, labels, rounds)]
    return rows


def throughput_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write the rows as a Markdown table."""
    head = ["model", "case", "parameters (M)", "train FLOPs", "train step", "fastest", "train images/s"]
    head += ["inference FLOPs", "inference", "fastest", "inference images/s", "train peak", "inference peak"]
    cells = []
    for row in rows:
        line = [row["model"], row["case"], f"{row['parameters'] / 1e6:.2f}"]
        for mode in ("train", "inference"):
            time = row[mode]
            shown = ["1", "1"] if row["case"] == "plain" else [str(time), f"{time.fastest:.3f}x"]
            line += [f"{row[f'{mode}_flops_ratio']:.3f}x", *shown, f"{row[f'{mode}_images']:.2f}"]
        cells.append([*line, *(f"{row[f'{mode}_peak_mib']:.0f} MiB" for mode in ("train", "inference"))])
    return table(head, cells)
