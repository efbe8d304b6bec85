"""Cached image models against timm's plain ones: images a second, memory, and what the counted operations foretell.

Everything is measured in one process, in turn. Training is a whole step (forward, backward, AdamW); inference runs with
folded caches, without gradient. The plain models are timm's own with fused attention (PVT, which timm lacks, is ours).
Operations are counted on the forward pass of the same batch, attention products included; the backward is about twice
that for both (and torch's counter takes the backward of a depthwise convolution for that of a dense one). This is the
paper's table 9 (arXiv:2312.12742), which gives throughput on a V100.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cached_transformers.experiments.costs.flops import count_flops, count_parameters
from cached_transformers.experiments.costs.live_bytes import LiveBytes
from cached_transformers.integrations.adapters import add_memory
from cached_transformers.integrations.hosted import TimmModel
from cached_transformers.memories.parts.shared_cache_memory import SharedCacheMemory
from cached_transformers.registry import unknown_name

from .grc import inference, train_step
from .interleaved import Ratio, compare

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


def measure(
    name: str,
    batch: int,
    rounds: int,
    device: str,
    *,
    image_size: int = 224,
    cases: Sequence[str] = ("plain", "GRC"),
    channels_last: bool = False,
    compiled: bool = False,
) -> list[Row]:
    """All rows of one model; see `run`."""
    form = torch.channels_last if channels_last else torch.contiguous_format
    models = {
        case: m.to(device=device, memory_format=form)  # type: ignore[call-overload]
        for case, m in build(MODELS[name], image_size, cases).items()
    }
    generator = torch.Generator().manual_seed(0)
    images = (
        torch.randn(batch, 3, image_size, image_size, generator=generator).to(device).contiguous(memory_format=form)
    )
    labels = torch.randint(0, 1000, (batch,), generator=generator).to(device)
    train_flops = {case: count_flops(model, images, mode="train") for case, model in models.items()}
    steps = {case: train_step(model, images, labels, compiled) for case, model in models.items()}
    train = compare(steps, "plain", rounds)
    train_peaks = {case: _peak(step) for case, step in steps.items()} if not compiled else {}
    for model in models.values():
        model.eval()
        for memory in model.modules():
            if isinstance(memory, SharedCacheMemory) and memory.cache.constant_in_evaluation:
                memory.fold()
    flops = {case: count_flops(model, images) for case, model in models.items()}
    runs = {case: inference(model, images, compiled) for case, model in models.items()}
    infer = compare(runs, "plain", 3 * rounds)
    peaks = {case: _peak(call) for case, call in runs.items()} if not compiled else {}
    return [
        Row(
            name,
            case,
            count_parameters(model),
            train_flops[case] / train_flops["plain"],
            flops[case] / flops["plain"],
            train[case],
            infer[case],
            batch / train[case].seconds,
            batch / infer[case].seconds,
            train_peaks.get(case, float("nan")) / 2**20,
            peaks.get(case, float("nan")) / 2**20,
        )
        for case, model in models.items()
    ]


def _peak(call: Callable[[], object]) -> float:
    """Bytes that were alive at once and were not before, at most, while `call` ran."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return float(torch.cuda.max_memory_allocated() - before)
    with LiveBytes() as live:
        call()
    return float(live.peak)


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
) -> list[Row]:
    """Measure models.

    Args:
        batch: images in a batch. rounds: counted rounds of training (inference takes three times as many).
        models: some of `MODELS`. image_size: side of the square images in pixels.
        released: measure the released variant of GRC, too.
        channels_last: weights and images in that memory format, plain models too.
        compiled: time all of them through `torch.compile`; peak memory is not measured then.

    Raises:
        ValueError: a model that is not in `MODELS`.
        ImportError: timm is not installed.
    """
    for name in models:
        if name not in MODELS:
            raise ValueError(unknown_name("image model of the benchmark", name, list(MODELS)))
    cases = list(CASES) if released else list(CASES)[:2]
    rows = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torchvision")
        for name in models:
            options: dict[str, Any] = {"channels_last": channels_last, "compiled": compiled}
            rows += measure(name, batch, rounds, device, image_size=image_size, cases=cases, **options)
    return rows


def as_markdown(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    head = (
        "model | case | parameters (M) | train FLOPs | train step | fastest | train images/s | inference FLOPs | "
        "inference | fastest | inference images/s | train peak | inference peak"
    )
    lines = [f"| {head} |", "|" + " --- |" * (head.count("|") + 1)]
    for r in rows:
        cells = [
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
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
