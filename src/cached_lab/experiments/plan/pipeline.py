"""How long a step would take whose segments several processes share (`training/pipeline.py`): a model, by formula.

P processes, D pipelines beside each other, so that there are N = P D processes. Each process has S / P segments of the
B / D rows of its pipeline, cut into M micro-batches; with a wavefront each micro-batch is one unit a layer. U = M, or
M L, units pass P processes and the P - 1 links between them, which all take equally long for each unit. A line of
machines like that, where every machine takes the units in one order, is through after

    flow(p, link, P, U) = P p + (P - 1) link + (U - 1) max(p, link)

    p     operations of the step / (N U peak share)            a third of it forward, two thirds backward
    link  latency + bytes of the state of B / (D U) rows / speed
    T     flow(p / 3, link) + flow(2 p / 3, link)              where no gradient crosses from process to process the
                                                              second part is 2/3 U p

A scan, for memories whose state is a linear function of the state before: every process computes its own segments at
once, and for each unit's state waits for ceil(log2 P) exchanges, T = U p + 2 U ceil(log2 P) link. It is not in the
package; it is here to say what it would bring.

Nothing of it is measured. Computing and sending overlap, which DDP's average of the gradients, at the end, does not.

Legend: of numbers, B rows, D pipelines, L layers, M micro-batches, N processes, P processes of a pipeline, S segments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cached_lab.training.config import RunConfig
from cached_transformers.models.diagonal import check_layers
from cached_transformers.state import nbytes

from .plan import GIB, Machine
from .rehearsal import Shape, bare_model, step_flops, without_values

FORWARD = 1 / 3
"""Share of the operations of a step that its forward has: products with the weights are made twice in the backward."""


@dataclass(frozen=True)
class Work:
    """What is to be done in a step, and what crosses from segment to segment.

    Attributes:
        flops: of forward and backward of one segment of one row. weights: bytes of gradients, which DDP averages.
        state: bytes of a row's state. layers: L, or 1 where the state spans the layers and no wavefront can be.
        rows, segments: B and S of a step. bptt: segments that a gradient crosses.
    """

    flops: float
    weights: int
    state: int
    layers: int
    rows: int
    segments: int
    bptt: int


@dataclass(frozen=True)
class Link:
    """Between two processes: seconds until a message is there however small, and bytes a second."""

    latency: float
    speed: float


@dataclass(frozen=True)
class Timing:
    """A step, by the model.

    Attributes:
        processes: P. pipelines: D. micro_batches: M. units: U. way: segments, wavefront or scan.
        seconds: of the step. averaging: of these, the average of the gradients. alone: of the step on one process.
        message: bytes of one handover of a unit's state.
    """

    processes: int
    pipelines: int
    micro_batches: int
    units: int
    way: str
    seconds: float
    averaging: float
    alone: float
    message: float

    @property
    def faster(self) -> float:
        """How many times faster than one process."""
        return self.alone / self.seconds

    @property
    def idle(self) -> float:
        """Share of the time in which a process does not compute."""
        return 1 - self.faster / (self.processes * self.pipelines)


def flow(process: float, link: float, processes: int, units: int) -> float:
    """Seconds in which equal units pass a line of processes and the links between them.

    Args:
        process, link: seconds that one unit takes of each.
    """
    between = link if processes > 1 else 0.0
    return processes * process + (processes - 1) * between + (units - 1) * max(process, between)


def timing(
    work: Work,
    peak: float,
    link: Link,
    processes: int,
    pipelines: int = 1,
    micro_batches: int = 1,
    way: str = "segments",
) -> Timing:
    """A step by the model above.

    Args:
        peak: operations a second that a process reaches. way: "segments", "wavefront" or "scan".

    Raises:
        ValueError: more processes than segments, more pipelines or micro-batches than rows, or a wavefront of a state
            that spans the layers.
    """
    if not 1 <= processes <= work.segments:
        raise ValueError(f"{processes} processes cannot share {work.segments} segments; take 1 to {work.segments}")
    if pipelines * micro_batches > work.rows:
        raise ValueError(
            f"{pipelines} pipelines x {micro_batches} micro-batches are more than {work.rows} rows; take fewer, or a "
            "larger training.batch_size"
        )
    if way != "segments" and work.layers == 1:
        raise ValueError(f"a {way} needs a state in each of several layers; take the order of the segments")
    units = micro_batches * (1 if way == "segments" else work.layers)
    total = work.flops * work.rows * work.segments / peak
    # The process that has one segment more than others sets the pace, as does the pipeline that has one row more.
    uneven = math.ceil(work.segments / processes) / work.segments * math.ceil(work.rows / pipelines) / work.rows
    one = total * uneven / units
    message = work.state * math.ceil(work.rows / pipelines) / units
    sending = link.latency + message / link.speed
    if way == "scan":
        seconds = units * one + 2 * units * math.ceil(math.log2(processes)) * sending
    else:
        seconds = flow(FORWARD * one, sending, processes, units)
        if math.ceil(work.segments / processes) % work.bptt == 0:  # windows end where processes part
            seconds += (1 - FORWARD) * one * units
        else:
            seconds += flow((1 - FORWARD) * one, sending, processes, units)
    everyone = processes * pipelines
    averaging = 0.0 if everyone == 1 else 2 * (everyone - 1) / everyone * work.weights / link.speed + link.latency
    return Timing(processes, pipelines, micro_batches, units, way, seconds + averaging, averaging, total, message)


def ways(work: Work, scan: bool = False) -> list[str]:
    """The ways that a state can go."""
    return ["segments", *(["wavefront", *(["scan"] if scan else [])] if work.layers > 1 else [])]


def best(work: Work, peak: float, link: Link, gpus: int, way: str) -> Timing:
    """The fastest division of up to so many GPUs, among powers of two; the one with fewest of those equally fast."""
    found = [timing(work, peak, link, p, d, m, way) for p, d, m in _divisions(work, gpus)]
    return min(found, key=lambda t: (t.seconds, t.processes * t.pipelines))


def _divisions(work: Work, gpus: int) -> Iterator[tuple[int, int, int]]:
    for processes in _powers(min(gpus, work.segments)):
        for pipelines in _powers(gpus // processes):
            for micro_batches in _powers(work.rows // pipelines):
                yield processes, pipelines, micro_batches


def _powers(most: int) -> list[int]:
    return [2**n for n in range(most.bit_length()) if 2**n <= most]


def stops_at(work: Work, peak: float, link: Link, pipelines: int, micro_batches: int, way: str) -> int:
    """The most processes of a pipeline, as a power of two, that compute for half of the time or more."""
    working = (
        p for p in _powers(work.segments) if timing(work, peak, link, p, pipelines, micro_batches, way).idle <= 0.5
    )
    return max(working, default=1)


def work_of(config: RunConfig, shape: Shape) -> Work:
    """The work of a recipe of text: operations of a rehearsed step, and bytes of the model's own state.

    Raises:
        ValueError: the recipe is not of text, or its model cannot be rehearsed.
    """
    if shape.task != "language":
        raise ValueError(f"a pipeline reads rows of text segment by segment; data {config.data['name']!r} are none")
    settings = config.training
    few = min(2, settings.segments)
    tokens = few * settings.segment_length
    flops = step_flops(config, Shape(shape.task, tokens), 1) / few
    bare = bare_model(config)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        state = nbytes(without_values(bare).init_state(1))  # type: ignore[operator]
    try:
        check_layers(bare, "wavefront")
        layers = len(bare.stack.blocks)  # type: ignore[union-attr, arg-type]
    except ValueError:
        layers = 1
    weights = sum(p.nbytes for p in bare.parameters() if p.requires_grad)
    return Work(flops, weights, state, layers, settings.batch_size, settings.segments, settings.bptt)


def reached(machine: Machine, precision: str) -> float:
    """Operations a second of a GPU."""
    return machine.peak(precision) * 1e12 * machine.mfu


def link_of(machine: Machine, latency_us: float) -> Link:
    """The link between two GPUs."""
    return Link(latency_us * 1e-6, machine.link_gib_s * GIB)
