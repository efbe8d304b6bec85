"""Plan of a training: memory per GPU, accumulation, traffic and hours.

All bytes are counted in a rehearsed step (`rehearsal.py`), and the micro-batch of a plan was rehearsed itself. Seconds
of a step = operations / (GPUs x peak x share) + sent bytes / speed of the link, without overlap.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import nn

from cached_lab.experiments.costs.flops import count_parameters
from cached_transformers.registry import unknown_name

from .rehearsal import StepBytes, bare_model, rehearse, step_flops
from .sizes import Sized

GIB = 2**30
PARALLEL = ("ddp", "fsdp", "none")
CARDS: dict[str, tuple[float, float, float]] = {
    "v100": (15.7, 125.0, 32.0),
    "a100": (19.5, 312.0, 80.0),
    "h100": (67.0, 989.0, 80.0),
    "h200": (67.0, 989.0, 141.0),
    "l4": (30.3, 121.0, 24.0),
    "rtx4090": (82.6, 165.0, 24.0),
}
"""TFLOP/s of dense products in float32 (without TF32, as torch's default) and in 16 bits, and GiB: data sheets."""


@dataclass(frozen=True)
class Machine:
    """Hardware of a plan.

    Args:
        gpus: number of processes, one GPU each.
        card: a name in `CARDS`.
        memory_gib: memory of a GPU; None for the card's.
        parallel: "ddp", "fsdp" (weights, gradients and optimiser are sharded), or "none" for one GPU.
        tflops: peak of a GPU; None for the card's in the recipe's precision.
        mfu: share of the peak that a training reaches.
        link_gib_s: GiB per second between GPUs.
        reserve_gib: memory left free for CUDA's context, workspaces and allocator fragments, which are not counted.

    Raises:
        ValueError: a number out of range, or several GPUs with "none".
    """

    gpus: int = 1
    card: str = "a100"
    memory_gib: float | None = None
    parallel: str = "ddp"
    tflops: float | None = None
    mfu: float = 0.35
    link_gib_s: float = 50.0
    reserve_gib: float = 4.0

    def __post_init__(self) -> None:
        if self.card not in CARDS:
            raise ValueError(unknown_name("--card", self.card, list(CARDS)))
        if self.parallel not in PARALLEL:
            raise ValueError(unknown_name("--parallel", self.parallel, list(PARALLEL)))
        if self.gpus < 1:
            raise ValueError(f"--gpus {self.gpus} must be at least 1")
        if self.gpus > 1 and self.parallel == "none":
            raise ValueError(f"--gpus {self.gpus} need --parallel ddp or fsdp")
        for name in ("memory_gib", "tflops", "link_gib_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"--{name.replace('_', '-')} {value} must be positive and finite")
        if not 0 < self.mfu <= 1:
            raise ValueError(f"--mfu {self.mfu} must lie in (0, 1]: it is a share of the peak")
        if not 0 <= self.reserve_gib < self.memory:
            raise ValueError(f"--reserve-gib {self.reserve_gib} must lie in [0, {self.memory:g}), the GPU's memory")

    @property
    def memory(self) -> float:
        """GiB of a GPU."""
        return CARDS[self.card][2] if self.memory_gib is None else self.memory_gib

    def peak(self, precision: str) -> float:
        """Return the TFLOP/s of a GPU."""
        return self.tflops or CARDS[self.card][0 if precision == "float32" else 1]


@dataclass(frozen=True)
class TrainingPlan:
    """Result of a plan.

    Attributes:
        parameters, trained: their numbers. rows: rows of a step. tokens: tokens of a row.
        micro_batch: rows of a piece: the largest that fits, or the smallest if none fits.
        accumulate: pieces of a GPU's rows, `training.accumulate`.
        room: estimated rows of a piece that would fit, from two rehearsed sizes; None if only one was rehearsed.
        parts: bytes of a GPU by kind; their sum is `total`.
        flops: of a step over all GPUs. sent: bytes that a GPU sends in a step.
        seconds: of a step, (computing, sending). hours: of the recipe's steps.
        assumed: assumptions, as sentences.
    """

    name: str
    machine: Machine
    precision: str
    parameters: int
    trained: int
    rows: int
    tokens: int
    steps: int
    fits: bool
    micro_batch: int
    accumulate: int
    room: int | None
    parts: dict[str, int]
    total: int
    flops: int
    sent: float
    seconds: tuple[float, float]
    hours: float
    assumed: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan for JSON."""
        return dataclasses.asdict(self)


def make_plan(recipe: Sized, machine: Machine) -> TrainingPlan:
    """Plan a recipe on a machine.

    Raises:
        ValueError: the rows of a batch do not divide evenly, or the model cannot be rehearsed.
    """
    config, gpus = recipe.config, machine.gpus
    bare = bare_model(config)
    search = _Search(recipe, machine, _largest_unit(bare))
    micro, room = search.largest()
    pieces, parts = search.pieces(micro), search.parts(micro)
    total = sum(parts.values())
    flops = step_flops(config, recipe.shape, micro) * pieces * gpus
    weights = sum(p.nbytes for p in bare.parameters())
    gradients = sum(p.nbytes for p in bare.parameters() if p.requires_grad)
    # In rings, a GPU sends (N - 1) / N of the bytes of an all-gather or a reduce-scatter, twice that of an all-reduce.
    share = (gpus - 1) / gpus
    if machine.parallel == "fsdp":
        sent = share * pieces * (2 * weights + gradients)
    else:
        buffers = sum(b.nbytes for b in bare.buffers()) if gpus > 1 else 0
        sent = 2 * share * gradients + share * pieces * buffers
    precision = config.training.precision
    seconds = (flops / (gpus * machine.peak(precision) * 1e12 * machine.mfu), sent / GIB / machine.link_gib_s)
    return TrainingPlan(
        name=config.name,
        machine=machine,
        precision=precision,
        parameters=count_parameters(bare),
        trained=sum(p.numel() for p in bare.parameters() if p.requires_grad),
        rows=recipe.rows,
        tokens=recipe.shape.tokens,
        steps=config.training.steps,
        fits=total <= search.budget,
        micro_batch=micro,
        accumulate=pieces,
        room=room,
        parts=parts,
        total=total,
        flops=flops,
        sent=sent,
        seconds=seconds,
        hours=config.training.steps * sum(seconds) / 3600,
        assumed=recipe.assumed,
    )


def parts_of(counted: StepBytes, pieces: int, shards: int = 1, buckets: int = 0, unit: int = 0) -> dict[str, int]:
    """Return the bytes of a GPU by kind.

    Args:
        counted: of a micro-batch, with gradients held if there are several pieces or shards.
        pieces: micro-batches of a step on this GPU. Each has its own states, and a step holds the old and the new.
        shards: shards of weights, gradients, optimiser and average (FSDP).
        buckets: bytes of DDP's buckets of gradients.
        unit: weights of the largest part that FSDP gathers; one is computed while the next is gathered.
    """
    held = counted.gradients // shards if pieces > 1 or shards > 1 else 0
    highest = max(counted.forward, counted.backward, counted.update // shards)
    return {
        "weights": counted.weights // shards,
        "optimiser": counted.optimizer // shards,
        "average of the weights": counted.average // shards,
        "buffers, and copies of them": counted.buffers + counted.copies,
        "gradients of earlier pieces" if shards == 1 else "gradients": held,
        "buckets of DDP" if buckets else "gathered by FSDP": buckets + (2 * unit if shards > 1 else 0),
        "states of the rows": counted.state * (2 * pieces - 1),
        "inputs": counted.inputs,
        "activations": counted.activations,
        "gradients and temporaries at the peak": highest - counted.activations,
    }


class _Search:
    """Search for the largest micro-batch that fits, by rehearsing candidates."""

    def __init__(self, recipe: Sized, machine: Machine, unit: int) -> None:
        self.recipe, self.machine, self.unit = recipe, machine, unit
        self.budget = (machine.memory - machine.reserve_gib) * GIB
        self.by_tokens, gpus = recipe.config.training.batch_tokens is not None, machine.gpus
        if not self.by_tokens and recipe.rows % gpus:
            below = max(n for n in range(1, recipe.rows + 1) if recipe.rows % n == 0 and (n < gpus or n == 1))
            raise ValueError(
                f"training.batch_size={recipe.rows} does not divide evenly over --gpus {gpus}; take --gpus {below}, "
                f"or training.batch_size={-(-recipe.rows // gpus) * gpus}"
            )
        self.mine = -(-recipe.rows // gpus)
        self._found: dict[tuple[int, bool], StepBytes] = {}

    def pieces(self, micro: int) -> int:
        return -(-self.mine // micro)

    def parts(self, micro: int, pieces: int | None = None) -> dict[str, int]:
        machine, pieces = self.machine, pieces or self.pieces(micro)
        shards = machine.gpus if machine.parallel == "fsdp" else 1
        key = (micro, pieces > 1 or shards > 1)
        if key not in self._found:
            self._found[key] = rehearse(self.recipe.config, self.recipe.shape, micro, gradients_held=key[1])
        counted = self._found[key]
        buckets = counted.gradients if machine.parallel == "ddp" and machine.gpus > 1 else 0
        return parts_of(counted, pieces, shards, buckets, self.unit)

    def largest(self) -> tuple[int, int | None]:
        """Return the largest micro-batch that fits, or the smallest, and the rows that a line through two allows."""

        def total(micro: int, pieces: int | None = None) -> int:
            return sum(self.parts(micro, pieces).values())

        def rows_that_fit(few: int, at_few: int, many: int, at_many: int) -> int | None:
            slope = (at_many - at_few) / (many - few)
            return None if slope <= 0 else max(0, int(many + (self.budget - at_many) / slope))

        if self.mine == 1:
            return 1, None
        whole, half = total(self.mine), self.mine // 2
        if whole <= self.budget:
            return self.mine, rows_that_fit(half, total(half, pieces=1), self.mine, whole)
        if self.by_tokens:
            sizes = sorted({-(-self.mine // pieces) for pieces in range(2, self.mine + 1)})
        else:
            sizes = [size for size in range(1, self.mine) if self.mine % size == 0]
        least = total(sizes[0])
        if least > self.budget:
            return sizes[0], None
        room = rows_that_fit(sizes[0], least, sizes[-1], total(sizes[-1])) if len(sizes) > 1 else None
        likely = [size for size in sizes if room is None or size <= room]
        return next((size for size in reversed(likely) if total(size) <= self.budget), sizes[0]), room


def _largest_unit(model: nn.Module) -> int:
    """Return the bytes of the largest part that FSDP gathers: a layer of a list, or everything outside of layers."""
    layers = [m for owner in model.modules() if isinstance(owner, nn.ModuleList) for m in owner]
    inside = {id(p) for layer in layers for p in layer.parameters()}
    rest = sum(p.nbytes for p in model.parameters() if id(p) not in inside)
    return max([rest, *(sum(p.nbytes for p in layer.parameters()) for layer in layers)])
