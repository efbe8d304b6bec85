"""Whether a recipe fits on so many GPUs, in which pieces, and for how long it would train.

Bytes of a GPU = weights + buffers + optimiser + average + what the way to share them adds + inputs + states + the
highest of the three phases of a step (forward, backward, update), all counted in a rehearsed step (`rehearsal.py`).
Nothing is fitted: the micro-batch that is said to fit was rehearsed itself. Seconds of a step = operations / (GPUs x
peak x share) + bytes sent / speed of the link, as if nothing of the two overlapped.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import nn

from cached_lab.experiments.costs.flops import count_parameters
from cached_transformers.registry import unknown_name

from .rehearsal import Bytes, bare_model, rehearse, step_flops
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
"""TFLOP/s of dense products in float32 (without TF32, which torch leaves off) and in bfloat16 or float16, and GiB: data
sheets."""


@dataclass(frozen=True)
class Machine:
    """What a recipe is to run on.

    Args:
        gpus: number of processes, one GPU each.
        card: a name in `CARDS`.
        memory_gib: of a GPU; None for that of the card.
        parallel: "ddp", where every GPU holds everything; "fsdp", where weights, gradients and optimiser are divided;
            "none" for one GPU.
        tflops: peak of a GPU; None for that of the card in the precision of the recipe.
        mfu: share of the peak that a training reaches.
        link_gib_s: GiB a second that a GPU sends to another.
        reserve_gib: what is left free for what is not counted: CUDA's context, workspaces of cuBLAS and cuDNN, and
            fragments of the allocator.

    Raises:
        ValueError: a number out of range, or several GPUs and no way to share the work.
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
            raise ValueError(f"--gpus {self.gpus} need a way to share the work: --parallel ddp or fsdp")
        for name in ("memory_gib", "tflops", "link_gib_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"--{name.replace('_', '-')} {value} must be positive and finite")
        if not 0 < self.mfu <= 1:
            raise ValueError(f"--mfu {self.mfu} is a share of the peak: it must lie in (0, 1]")
        if not 0 <= self.reserve_gib < self.memory:
            raise ValueError(
                f"--reserve-gib {self.reserve_gib} must lie in [0, {self.memory:g}), the memory of the GPU"
            )

    @property
    def memory(self) -> float:
        """GiB of a GPU."""
        return CARDS[self.card][2] if self.memory_gib is None else self.memory_gib

    def peak(self, precision: str) -> float:
        """TFLOP/s of a GPU."""
        return self.tflops or CARDS[self.card][0 if precision == "float32" else 1]

    @property
    def shards(self) -> int:
        """Into how many parts weights, gradients and optimiser are divided."""
        return self.gpus if self.parallel == "fsdp" else 1


@dataclass(frozen=True)
class Plan:
    """What was found.

    Attributes:
        parameters, trained: numbers of them. rows: of a step. tokens: of a row.
        micro_batch: rows of a piece; the largest that fits, or where none does the smallest that there is.
        accumulate: pieces of a GPU's rows, `training.accumulate`.
        room: rows of a piece that would fit if the batch were larger, by the line through two rehearsed sizes; None
            where only one size was rehearsed.
        parts: bytes of a GPU by what they are; they add up to `total`.
        flops: of a step, all GPUs together. sent: bytes that a GPU sends in a step.
        seconds: of a step, (computing, sending). hours: of the steps of the recipe.
        assumed: sentences.
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
        """For JSON."""
        return dataclasses.asdict(self)


def make_plan(recipe: Sized, machine: Machine) -> Plan:
    """The plan of a recipe on a machine.

    Raises:
        ValueError: the rows of a batch do not divide evenly, or the model cannot be rehearsed.
    """
    config, shape = recipe.config, recipe.shape
    bare = bare_model(config)
    search = _Search(recipe, machine, _unit(bare))
    micro, room = search.largest()
    pieces, parts = search.pieces(micro), search.parts(micro)
    total = sum(parts.values())
    flops = step_flops(config, shape, micro) * pieces * machine.gpus
    trained = [p for p in bare.parameters() if p.requires_grad]
    weights = sum(p.nbytes for p in bare.parameters())
    sent = _sent(machine, weights, sum(p.nbytes for p in trained), sum(b.nbytes for b in bare.buffers()), pieces)
    precision = config.training.precision
    seconds = (flops / (machine.gpus * machine.peak(precision) * 1e12 * machine.mfu), sent / GIB / machine.link_gib_s)
    return Plan(
        name=config.name,
        machine=machine,
        precision=precision,
        parameters=count_parameters(bare),
        trained=sum(p.numel() for p in trained),
        rows=recipe.rows,
        tokens=shape.tokens,
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


def parts_of(counted: Bytes, pieces: int, shards: int = 1, copies: int = 0, unit: int = 0) -> dict[str, int]:
    """Bytes of a GPU by what they are.

    Args:
        counted: of a micro-batch, with gradients held where there are several pieces or shards.
        pieces: micro-batches of a step on this GPU. Each has its own states, and a step holds the old and the new.
        shards: parts into which weights, gradients, optimiser and average are divided (FSDP).
        copies: bytes of the buckets in which DDP sends gradients. unit: weights of the largest part that FSDP gathers;
            while one is computed the next one comes.
    """
    held = counted.gradients // shards if pieces > 1 or shards > 1 else 0
    highest = max(counted.forward, counted.backward, counted.update // shards)
    return {
        "weights": counted.weights // shards,
        "optimiser": counted.optimizer // shards,
        "average of the weights": counted.average // shards,
        "buffers, and copies of them": counted.buffers + counted.remembered,
        "gradients of earlier pieces" if shards == 1 else "gradients": held,
        "buckets of DDP" if copies else "gathered by FSDP": copies + (2 * unit if shards > 1 else 0),
        "states of the rows": counted.state * (2 * pieces - 1),
        "inputs": counted.inputs,
        "activations": counted.activations,
        "gradients and temporaries at the peak": highest - counted.activations,
    }


class _Search:
    """Rehearses micro-batches until the largest that fits is found."""

    def __init__(self, recipe: Sized, machine: Machine, unit: int) -> None:
        self.recipe, self.machine, self.unit = recipe, machine, unit
        self.budget = (machine.memory - machine.reserve_gib) * GIB
        settings, gpus = recipe.config.training, machine.gpus
        if settings.batch_tokens is None and recipe.rows % gpus:
            near = [n for n in range(1, recipe.rows + 1) if recipe.rows % n == 0]
            below, above = max(n for n in near if n < gpus or n == 1), -(-recipe.rows // gpus) * gpus
            raise ValueError(
                f"training.batch_size={recipe.rows} does not divide evenly over --gpus {gpus}; take --gpus {below}, "
                f"or training.batch_size={above}"
            )
        self.mine = -(-recipe.rows // gpus)
        self._found: dict[tuple[int, bool], Bytes] = {}

    def pieces(self, micro: int) -> int:
        """Pieces of so many rows that make the rows of a GPU."""
        return -(-self.mine // micro)

    def parts(self, micro: int, pieces: int | None = None) -> dict[str, int]:
        """Bytes by what they are, with so many rows in a piece; `pieces` where they do not follow from that."""
        machine, pieces = self.machine, pieces or self.pieces(micro)
        key = (micro, pieces > 1 or machine.shards > 1)
        if key not in self._found:
            self._found[key] = rehearse(self.recipe.config, self.recipe.shape, micro, gradients_held=key[1])
        counted = self._found[key]
        copies = counted.gradients if machine.parallel == "ddp" and machine.gpus > 1 else 0
        return parts_of(counted, pieces, machine.shards, copies, self.unit)

    def total(self, micro: int, pieces: int | None = None) -> int:
        """Bytes of a GPU."""
        return sum(self.parts(micro, pieces).values())

    def largest(self) -> tuple[int, int | None]:
        """The largest micro-batch that fits, else the smallest; and how many rows the line through two sizes allows.

        The line says where to look. What it finds is rehearsed, and the next smaller one where it does not fit.
        """
        if self.mine == 1:
            return 1, None
        whole = self.total(self.mine)
        if whole <= self.budget:
            half = self.mine // 2
            return self.mine, self._room(half, self.total(half, pieces=1), self.mine, whole)
        sizes = self._sizes()
        least = self.total(sizes[0])
        if least > self.budget:
            return sizes[0], None
        room = self._room(sizes[0], least, sizes[-1], self.total(sizes[-1])) if len(sizes) > 1 else None
        likely = [size for size in sizes if room is None or size <= room]
        return next((size for size in reversed(likely) if self.total(size) <= self.budget), sizes[0]), room

    def _sizes(self) -> list[int]:
        """Sizes of pieces, from the smallest: all pieces of a step are alike."""
        if self.recipe.config.training.batch_tokens is None:
            return [size for size in range(1, self.mine) if self.mine % size == 0]
        return sorted({-(-self.mine // pieces) for pieces in range(2, self.mine + 1)})

    def _room(self, few: int, at_few: int, many: int, at_many: int) -> int | None:
        slope = (at_many - at_few) / (many - few)
        return None if slope <= 0 else max(0, int(many + (self.budget - at_many) / slope))


def _unit(model: nn.Module) -> int:
    """Bytes of the largest part that FSDP would gather at a time: a layer of a list, or what is outside of layers."""
    layers = [m for owner in model.modules() if isinstance(owner, nn.ModuleList) for m in owner]
    inside = {id(p) for layer in layers for p in layer.parameters()}
    rest = sum(p.nbytes for p in model.parameters() if id(p) not in inside)
    return max([rest, *(sum(p.nbytes for p in layer.parameters()) for layer in layers)])


def _sent(machine: Machine, weights: int, gradients: int, buffers: int, pieces: int) -> float:
    """Bytes that a GPU sends in a step, with rings.

    DDP: an all-reduce of the gradients, 2 (N - 1) / N of them, at the last piece, and the buffers before each. FSDP:
    two all-gathers of the weights and a reduce-scatter of the gradients for each piece, (N - 1) / N each.
    """
    share = (machine.gpus - 1) / machine.gpus
    if machine.parallel == "fsdp":
        return share * pieces * (2 * weights + gradients)
    return 2 * share * gradients + (share * pieces * buffers if machine.gpus > 1 else 0.0)
