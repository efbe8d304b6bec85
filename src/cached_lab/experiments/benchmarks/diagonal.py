"""Segments along diagonals beside one segment after the other, with memories that live in the layers.

What diagonals save is calls: one group of G blocks does what G blocks did. They can win where a segment of one row is
too little work for the machine, and cost stacked weights and states, and matrix products without a fused bias.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from cached_lab.experiments.reports.markdown import table
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.models.diagonal import SCHEDULES

from .interleaved import Ratio, compare, training_step
from .memories import build
from .peers import Sizes, random_tokens

MEMORIES = ("transformer_xl", "grc_stream")
LENGTHS = (16, 64)
DEPTHS = (4, 8)
WIDTHS = (64, 256)
BASE = Sizes(segments=16, rows=1)


@dataclass(frozen=True)
class Row:
    """One size: time of one segment after the other over that along diagonals, above 1 where diagonals are faster.

    Attributes:
        step: of a training step, the gradient across all segments where the memory hands one on.
        forward: without gradient.
    """

    memory: str
    depth: int
    width: int
    segment: int
    step: Ratio
    forward: Ratio


def measure(memory: str, sizes: Sizes, rounds: int, device: str = "cpu") -> Row:
    """Both orders of one model, with a memory of as many slots as a segment has tokens."""
    model = build({"name": memory, "length": sizes.segment}, sizes).to(device)
    tokens = random_tokens(sizes).to(device)
    arguments = tokens[:, :-1], tokens[:, 1:]
    loops = {name: SegmentLoop(model, sizes.segment, sizes.segments, schedule=name) for name in SCHEDULES}

    def loss(loop: nn.Module) -> Tensor:
        return loop(*arguments)[0]  # type: ignore[no-any-return]

    steps = {name: training_step(model, partial(loss, loop)) for name, loop in loops.items()}
    step = compare(steps, "diagonal", rounds)["segments"]
    model.eval()
    reads = {name: partial(torch.no_grad()(loss), loop) for name, loop in loops.items()}
    forward = compare(reads, "diagonal", rounds)["segments"]
    return Row(memory, sizes.depth, sizes.width, sizes.segment, step, forward)


def run(rounds: int, device: str, memories: Sequence[str] = MEMORIES, lengths: Sequence[int] = LENGTHS) -> list[Row]:
    """Every memory with every depth, width and segment length."""
    return [
        measure(memory, dataclasses.replace(BASE, depth=depth, width=width, segment=segment), rounds, device)
        for memory, depth, width, segment in itertools.product(memories, DEPTHS, WIDTHS, lengths)
    ]


def as_markdown(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    head = ["memory", "layers", "width", "segment", "training step, diagonal = 1", "without gradient, diagonal = 1"]
    return table(
        head, [[r.memory, str(r.depth), str(r.width), str(r.segment), str(r.step), str(r.forward)] for r in rows]
    )
