"""Cached image models against timm's plain ones: images a second, memory, and what the counted operations foretell.

Inference runs with folded caches, without gradient. The plain models are timm's own with fused attention (PVT, which
timm lacks, is ours). Operations are counted on the forward pass of the same batch, attention products included; the
backward is about twice that for both (and torch's counter takes the backward of a depthwise convolution for that of a
dense one). This is the paper's table 9 (arXiv:2312.12742), which gives throughput on a V100.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_lab.experiments.costs.flops import count_flops, count_parameters
from cached_lab.experiments.costs.live_bytes import peak_bytes
from cached_lab.experiments.reports.markdown import table
from cached_transformers.integrations.adapters import add_memory
from cached_transformers.integrations.models import TimmModel
from cached_transformers.memories.parts.shared_cache_memory import SharedCacheMemory
from cached_transformers.registry import unknown_name

from .interleaved import Ratio, compare, precision, training_step

Batch = tuple[Tensor, Tensor]

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
"""What is measured unless others are named."""

CASES: Mapping[str, dict[str, Any] | None] = {
    "plain": None,
    "GRC": {"variant": "paper"},
    "GRC, released variant": {"variant": "released"},
}


@dataclass(frozen=True)
class Row:
    """Measurements of one case; ratios are to the plain model, operations counted and time taken.

    Attributes:
        train_images, inference_images: a second, by the median time.
        train_peak_mib, inference_peak_mib: most bytes alive at once beside the weights: in a training step with
            gradients and AdamW's state, and in inference.
    """

    model: str
    case: str
    parameters: int
    train_flops_ratio: float
    inference_flops_ratio: float
    train: Ratio
    inference: Ratio
    train_images: float
    inference_images: float
    train_peak_mib: float
    inference_peak_mib: float


def build(architecture: str, image_size: int, cases: Sequence[str]) -> dict[str, nn.Module]:
    """The model of each case, from the same weights.

    Args:
        architecture: name in timm. image_size: side of the square images in pixels.
    """
    torch.manual_seed(0)
    sized: dict[str, Any] = {} if "pvt_v2" in architecture else {"img_size": image_size}
    plain = TimmModel(architecture, **sized).model
    models = {}
    for case in cases:
        options = CASES[case]
        models[case] = copy.deepcopy(plain)
        if options is not None:
            add_memory(models[case], "grc", **options, input_size=(image_size, image_size))
    return models


class Timed(NamedTuple):
    """What was counted and timed, by case; peaks are bytes, and there are none where they were not asked."""

    train_flops: dict[str, int]
    flops: dict[str, int]
    train: dict[str, Ratio]
    inference: dict[str, Ratio]
    train_peaks: dict[str, int]
    peaks: dict[str, int]


def image_batch(batch: int, side: int, device: str, form: torch.memory_format = torch.contiguous_format) -> Batch:
    """Random images and labels, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, side, side, generator=generator).to(device).contiguous(memory_format=form)
    return images, torch.randint(0, 1000, (batch,), generator=generator).to(device)


def fold(model: nn.Module) -> None:
    """Evaluation mode, with the keys and values of caches as constants."""
    model.eval()
    for memory in model.modules():
        if isinstance(memory, SharedCacheMemory) and memory.cache.constant_in_evaluation:
            memory.fold()


def timed(
    models: Mapping[str, nn.Module],
    images: Tensor,
    labels: Tensor,
    rounds: int,
    compiled: bool,
    peaks: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Timed:
    """Count and time whole training steps, then inference with folded caches; the models stay in evaluation mode."""
    calls = {case: torch.compile(model) if compiled else model for case, model in models.items()}

    def loss(case: str) -> Tensor:
        with precision(images.device.type, dtype):
            return F.cross_entropy(calls[case](images), labels)

    @torch.no_grad()
    def infer(case: str) -> None:
        with precision(images.device.type, dtype):
            calls[case](images)

    def peaks_of(work: Mapping[str, Callable[[], object]]) -> dict[str, int]:
        return {case: peak_bytes(call, images.device.type) for case, call in work.items()} if peaks else {}

    train_flops = {case: count_flops(model, images, mode="train") for case, model in models.items()}
    steps = {case: training_step(model, functools.partial(loss, case)) for case, model in models.items()}
    train, train_peaks = compare(steps, "plain", rounds), peaks_of(steps)
    for model in models.values():
        fold(model)
    flops = {case: count_flops(model, images) for case, model in models.items()}
    runs = {case: functools.partial(infer, case) for case in models}
    return Timed(train_flops, flops, train, compare(runs, "plain", 3 * rounds), train_peaks, peaks_of(runs))


def run(
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
) -> list[Row]:
    """Measure models.

    Args:
        batch: images in a batch. rounds: counted rounds of training (inference takes three times as many).
        models: some of `MODELS`. image_size: side of the square images in pixels.
        released: measure the released variant of GRC, too.
        channels_last: weights and images in that memory format, plain models too.
        compiled: time all of them through `torch.compile`; peak memory is not measured then.
        dtype: of autocast; float32 for none.
    """
    for name in models:
        if name not in MODELS:
            raise ValueError(unknown_name("image model of the benchmark", name, list(MODELS)))
    cases = list(CASES) if released else list(CASES)[:2]
    form = torch.channels_last if channels_last else torch.contiguous_format
    images, labels = image_batch(batch, image_size, device, form)
    rows = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torchvision")
        for name in models:
            built = build(MODELS[name], image_size, cases)
            for model in built.values():
                model.to(device=device, memory_format=form)  # type: ignore[call-overload]
            rows += _rows(name, built, timed(built, images, labels, rounds, compiled, not compiled, dtype), batch)
    return rows


def _rows(name: str, models: Mapping[str, nn.Module], found: Timed, batch: int) -> list[Row]:
    return [
        Row(
            name,
            case,
            count_parameters(model),
            found.train_flops[case] / found.train_flops["plain"],
            found.flops[case] / found.flops["plain"],
            found.train[case],
            found.inference[case],
            batch / found.train[case].seconds,
            batch / found.inference[case].seconds,
            found.train_peaks.get(case, float("nan")) / 2**20,
            found.peaks.get(case, float("nan")) / 2**20,
        )
        for case, model in models.items()
    ]


def as_markdown(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    head = (
        "model | case | parameters (M) | train FLOPs | train step | fastest | train images/s | inference FLOPs | "
        "inference | fastest | inference images/s | train peak | inference peak"
    )
    cells = [
        [
            r.model,
            r.case,
            f"{r.parameters / 1e6:.2f}",
            f"{r.train_flops_ratio:.3f}x",
            *((str(r.train), f"{r.train.fastest:.3f}x") if r.case != "plain" else ("1", "1")),
            f"{r.train_images:.2f}",
            f"{r.inference_flops_ratio:.3f}x",
            *((str(r.inference), f"{r.inference.fastest:.3f}x") if r.case != "plain" else ("1", "1")),
            f"{r.inference_images:.2f}",
            f"{r.train_peak_mib:.0f} MiB",
            f"{r.inference_peak_mib:.0f} MiB",
        ]
        for r in rows
    ]
    return table(head.split(" | "), cells)
