"""Throughput of image models with GRC against the plain models: images a second, peak memory, counted FLOPs.

Inference runs with folded caches and without gradient. Plain models are timm's with fused attention, and our PVT,
which timm lacks. FLOPs are counted on the forward pass, attention products included; the backward pass takes about
twice as many in both. This is table 9 of arXiv:2312.12742, which gives throughput on a V100.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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
from .timing import Ratio, compare, precision, training_step

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


def build_backbones(architecture: str, image_size: int, cases: Sequence[str]) -> dict[str, nn.Module]:
    """Build the model of each case from the same weights, for square images of `image_size` pixels."""
    torch.manual_seed(0)
    sized: dict[str, Any] = {} if "pvt_v2" in architecture else {"img_size": image_size}
    plain = TimmModel(architecture, **sized).model
    models = {case: copy.deepcopy(plain) for case in cases}
    for case, model in models.items():
        options = CASES[case]
        if options is not None:
            add_memory(model, "grc", **options, input_size=(image_size, image_size))
    return models


def image_batch(
    batch: int, side: int, device: str, layout: torch.memory_format = torch.contiguous_format
) -> tuple[Tensor, Tensor]:
    """Return random images and labels, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, side, side, generator=generator).to(device).contiguous(memory_format=layout)
    return images, torch.randint(0, 1000, (batch,), generator=generator).to(device)


def fold_caches(model: nn.Module) -> None:
    """Set evaluation mode, and make the keys and values of caches constants."""
    model.eval()
    for memory in model.modules():
        if isinstance(memory, SharedCacheMemory) and memory.cache.constant_in_evaluation:
            memory.fold()


class ThroughputTimes(NamedTuple):
    """Counts, times and peak bytes by case; peaks are empty where they were not measured."""

    train_flops: dict[str, int]
    flops: dict[str, int]
    train: dict[str, Ratio]
    inference: dict[str, Ratio]
    train_peaks: dict[str, int]
    peaks: dict[str, int]


def time_backbones(
    models: Mapping[str, nn.Module],
    images: Tensor,
    labels: Tensor,
    rounds: int,
    *,
    compiled: bool = False,
    peaks: bool = False,
    dtype: torch.dtype = torch.float32,
) -> ThroughputTimes:
    """Count and time training steps, then inference with folded caches; the models stay in evaluation mode."""
    device = images.device.type
    calls = {case: torch.compile(model) if compiled else model for case, model in models.items()}

    def loss(case: str) -> Tensor:
        with precision(device, dtype):
            return F.cross_entropy(calls[case](images), labels)

    @torch.no_grad()
    def infer(case: str) -> None:
        with precision(device, dtype):
            calls[case](images)

    def peaks_of(work: Mapping[str, Callable[[], object]]) -> dict[str, int]:
        return {case: peak_bytes(call, device) for case, call in work.items()} if peaks else {}

    train_flops = {case: count_flops(model, images, mode="train") for case, model in models.items()}
    steps = {case: training_step(model, functools.partial(loss, case)) for case, model in models.items()}
    train, train_peaks = compare(steps, "plain", rounds), peaks_of(steps)
    for model in models.values():
        fold_caches(model)
    flops = {case: count_flops(model, images) for case, model in models.items()}
    runs = {case: functools.partial(infer, case) for case in models}
    return ThroughputTimes(train_flops, flops, train, compare(runs, "plain", 3 * rounds), train_peaks, peaks_of(runs))


def measure_throughput(
    batch: int,
    rounds: int,
    device: str,
    *,
    models: Sequence[str] = STANDARD,
    image_size: int = 224,
    released: bool = False,
    channels_last: bool = False,
    compiled: bool = False,
    dtype: torch.dtype = torch.float32,
) -> list[dict[str, Any]]:
    """Measure some of `MODELS`, plain and with GRC.

    Args:
        rounds: counted rounds of training; inference takes three times as many.
        released: also measure the released variant of GRC.
        channels_last: memory format of weights and images, plain models included.
        compiled: time every model through `torch.compile`; peak memory is not measured then.
        dtype: autocast dtype; float32 for none.

    Returns:
        a row for each model and case. `train` and `inference` are `Ratio`s to the plain model, peaks are MiB beyond the
        weights.

    Raises:
        ValueError: an unknown model.
    """
    for name in models:
        if name not in MODELS:
            raise ValueError(unknown_name("image model of the benchmark", name, list(MODELS)))
    layout = torch.channels_last if channels_last else torch.contiguous_format
    images, labels = image_batch(batch, image_size, device, layout)
    rows: list[dict[str, Any]] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torchvision")
        for name in models:
            built = build_backbones(MODELS[name], image_size, list(CASES) if released else list(CASES)[:2])
            for model in built.values():
                model.to(device=device, memory_format=layout)  # type: ignore[call-overload]
            found = time_backbones(built, images, labels, rounds, compiled=compiled, peaks=not compiled, dtype=dtype)
            for case, model in built.items():
                row = {
                    "model": name,
                    "case": case,
                    "parameters": count_parameters(model),
                    "train_flops_ratio": found.train_flops[case] / found.train_flops["plain"],
                    "inference_flops_ratio": found.flops[case] / found.flops["plain"],
                    "train": found.train[case],
                    "inference": found.inference[case],
                    "train_images": batch / found.train[case].seconds,
                    "inference_images": batch / found.inference[case].seconds,
                    "train_peak_mib": found.train_peaks.get(case, float("nan")) / 2**20,
                    "inference_peak_mib": found.peaks.get(case, float("nan")) / 2**20,
                }
                rows.append(row)
    return rows


def throughput_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write the rows as a Markdown table."""
    head = ["model", "case", "parameters (M)"]
    head += ["train FLOPs", "train step", "fastest", "train images/s"]
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
