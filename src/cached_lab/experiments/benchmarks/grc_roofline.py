"""What GRC must cost in an image model whatever the code: each piece of its work alone, as a share of the plain model.

The pieces (`grc_pieces.py`) are measured at the shapes that the model's layers have, from buffers that are warm. Their
sum is the floor with torch's kernel of attention; with the kernel's products and exponentials in its place it is the
floor of any. Neither adds anything for starting operations, for cold buffers, or for what one piece hands to the next.

Legend: B rows, N tokens, K keys, C cache width, H heads, F = C / H.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_lab.experiments.costs.flops import count_flops, flops_of
from cached_lab.experiments.reports.markdown import table
from cached_transformers.memories.grc.shared_cache_memory import SharedCacheMemory

from . import grc
from .grc_pieces import KERNEL, WITHIN, Shape, moved_bytes, optimizer_step, pieces
from .interleaved import Ratio, compare, training_step
from .vision import fold, image_batch

NOTHING = Ratio(0.0, 0.0, 0.0, 0.0, 0.0)
"""The time of what is not there."""


@dataclass(frozen=True)
class Row:
    """One piece, or a whole: operations and bytes of one call, and its time as a share of the plain model's."""

    model: str
    piece: str
    train_gflops: float
    train_mib: float
    train: Ratio
    inference_gflops: float
    inference_mib: float
    inference: Ratio


def run(batch: int, rounds: int, device: str, side: int = grc.SIDE) -> list[Row]:
    """Measure every model of `grc.MODELS`, without and with GRC, and the pieces of what GRC adds.

    Args:
        batch: images in a batch. rounds: counted rounds of training (inference takes three times as many).
        side: of the images in pixels, for which the models are made.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torchvision")
        found = [_measure(name, architecture, batch, rounds, device, side) for name, architecture in grc.MODELS.items()]
    return [row for rows in found for row in rows]


def _measure(name: str, architecture: str, batch: int, rounds: int, device: str, side: int) -> list[Row]:
    models = {case: model.to(device) for case, model in grc.build(architecture, side, ("plain", "GRC")).items()}
    images, labels = image_batch(batch, side, device)
    shapes = shapes_of(models["GRC"], images)

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(images), labels)

    @torch.no_grad()
    def infer(model: nn.Module) -> None:
        model(images)

    training = pieces(shapes, device, training=True) | {"AdamW": optimizer_step(models["GRC"])}
    inferring = pieces(shapes, device, training=False)
    # A training step takes three times the operations of its forward pass.
    train_flops = {case: 3 * count_flops(model, images, mode="train") for case, model in models.items()}
    steps = {case: training_step(model, partial(loss, model)) for case, model in models.items()}
    train = compare(steps | training, "plain", rounds)
    for model in models.values():
        fold(model)
    flops = {case: count_flops(model, images) for case, model in models.items()}
    calls = {case: partial(infer, model) for case, model in models.items()}
    inference = compare(calls | inferring, "plain", 3 * rounds)
    train_flops |= {piece: flops_of(call) for piece, call in training.items()}
    flops |= {piece: flops_of(call) for piece, call in inferring.items()}
    moved = {"bytes": (moved_bytes(shapes, training=True), moved_bytes(shapes, training=False))}
    rows = []
    for piece in train:
        train_bytes, inference_bytes = moved.get(piece, (0, 0))
        rows.append(
            Row(
                name,
                piece,
                train_flops[piece] / 1e9,
                train_bytes / 2**20,
                train[piece],
                flops.get(piece, 0) / 1e9,
                inference_bytes / 2**20,
                inference.get(piece, NOTHING),
            )
        )
    return rows


def shapes_of(model: nn.Module, images: Tensor) -> Counter[Shape]:
    """Shapes of the memories' work in one forward pass, each as often as there are such layers."""
    found: Counter[Shape] = Counter()
    handles = []
    for memory in model.modules():
        if isinstance(memory, SharedCacheMemory):

            def note(branch: nn.Module, args: tuple[Tensor, ...], cache: nn.Module = memory.cache) -> None:
                x_BNC, k_BHKF, _ = args
                (rows, tokens, width), (_, heads, keys, _) = x_BNC.shape, k_BHKF.shape
                slots = int(cache.length)  # type: ignore[arg-type]
                full = round(width / grc.RATIO)
                found[Shape(rows, tokens, slots, keys, width, heads, full, math.isqrt(slots // keys))] += 1

            handles.append(memory.branch.register_forward_pre_hook(note))
    with torch.no_grad():
        model.eval()(images)
    for handle in handles:
        handle.remove()
    return found


def floor(rows: Sequence[Row], *, perfect: bool = False) -> tuple[float, float]:
    """The least that a training step and inference of one model take with GRC: the plain model and all pieces.

    Args:
        perfect: of attention its products and exponentials alone, in the place of torch's kernel.
    """
    left_out = ("GRC", KERNEL) if perfect else ("GRC", *WITHIN)
    added = [row for row in rows if row.piece not in left_out]
    return sum(row.train.median for row in added), sum(row.inference.median for row in added)


def as_markdown(rows: list[Row]) -> str:
    """The pieces, their sum with the plain model, and what was measured of the whole, as a Markdown table."""
    head = (
        "model | piece | train GFLOPs | train MiB | train, alone | inference GFLOPs | inference MiB | inference, alone"
    )
    cells = []
    for model in dict.fromkeys(row.model for row in rows):
        of_model = [row for row in rows if row.model == model]
        own = {row.piece: row for row in of_model}
        plain, cached = own.pop("plain"), own.pop("GRC")
        cells.append(_cells(plain, f"1 ({plain.train.seconds:.2f} s)", f"1 ({plain.inference.seconds:.2f} s)"))
        cells += [_cells(row, *(_percent(ratio) for ratio in (row.train, row.inference))) for row in own.values()]
        for name, perfect in (("floor: plain and all of these", False), ("floor, attention as its parts", True)):
            train, inference = floor(of_model, perfect=perfect)
            cells.append([model, name, "", "", f"{train:.3f}x", "", "", f"{inference:.3f}x"])
        cells.append(_cells(cached, str(cached.train), str(cached.inference)))
    return table(head.split(" | "), cells)


def _cells(row: Row, train: str, inference: str) -> list[str]:
    flops_mib = [(row.train_gflops, row.train_mib), (row.inference_gflops, row.inference_mib)]
    (a, b), (c, d) = [[f"{number:.1f}" if number else "" for number in pair] for pair in flops_mib]
    return [row.model, row.piece, a, b, train, c, d, inference]


def _percent(ratio: Ratio) -> str:
    if not ratio.seconds:
        return ""
    return f"{100 * ratio.median:.1f} % ({100 * ratio.low:.1f}-{100 * ratio.high:.1f})"
