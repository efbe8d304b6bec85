"""`cached plan RECIPE --gpus N --pipeline P`: the time of a step whose segments several GPUs share, by a model."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cached_lab.experiments.plan.pipeline import Link, Timing, Work
    from cached_lab.experiments.plan.plan import Machine
    from cached_lab.experiments.plan.sizes import Sized

COLUMNS = (
    "recipe",
    "way",
    "pipelines x GPUs",
    "micro-batches",
    "seconds a step",
    "times one GPU",
    "idle",
    "KiB a message",
)


def run_pipeline(recipes: Sequence[Sized], machine: Machine, arguments: argparse.Namespace) -> int:
    """Print what the model says of each recipe, for each way in which its state can go."""
    from cached_lab.experiments.plan.pipeline import link_of, reached, stops_at, ways, work_of

    link, found = link_of(machine, arguments.latency_us), []
    for recipe in recipes:
        work, peak = work_of(recipe.config, recipe.shape), reached(machine, recipe.config.training.precision)
        for way in ways(work):
            timed = _timing(work, peak, link, machine.gpus, arguments, way)
            most = stops_at(work, peak, link, timed.pipelines, timed.micro_batches, way)
            found.append((recipe.config.name, work, timed, most))
    if arguments.json:
        print(json.dumps([_as_dict(*one) for one in found], indent=1))
    elif arguments.markdown:
        print(f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * 2}{' ---: |' * (len(COLUMNS) - 2)}", sep="\n")
        for name, _, timed, _ in found:
            print(f"| {' | '.join([f'`{name}`', *cells(timed)])} |")
    else:
        for one in found:
            print("\n".join(sentences(*one)), end="\n\n")
        print("a model: nothing of it was measured (docs/plan.md)")
    return 0


def _timing(work: Work, peak: float, link: Link, gpus: int, arguments: argparse.Namespace, way: str) -> Timing:
    from cached_lab.experiments.plan.pipeline import best, timing

    if arguments.pipeline == "auto":
        if arguments.micro_batches is not None:
            raise ValueError("--pipeline auto finds the micro-batches, too; give --pipeline P, or leave them out")
        return best(work, peak, link, gpus, way)
    processes = int(arguments.pipeline) if arguments.pipeline.isdecimal() else 0
    if processes < 1 or gpus % processes:
        raise ValueError(
            f"--pipeline {arguments.pipeline} must be auto, or a number of GPUs that divides --gpus {gpus}"
        )
    pipelines = gpus // processes
    most = max(1, work.rows // pipelines)
    given = arguments.micro_batches
    if given is not None and given < 1:
        raise ValueError(f"--micro-batches {given} must be at least 1")
    tried = [2**n for n in range(most.bit_length())] if given is None else [given]
    return min((timing(work, peak, link, processes, pipelines, m, way) for m in tried), key=lambda t: t.seconds)


def cells(timed: Timing) -> list[str]:
    """A row of the table, behind the name."""
    return [
        timed.way,
        f"{timed.pipelines:,} x {timed.processes:,}",
        f"{timed.micro_batches:,}",
        f"{timed.seconds:.3g}",
        f"{timed.faster:,.1f}",
        f"{timed.idle:.0%}",
        f"{timed.message / 1024:,.0f}" if timed.processes > 1 else "",
    ]


def sentences(name: str, work: Work, timed: Timing, most: int) -> list[str]:
    """What the model says of one way."""
    return [
        f"{name}, {timed.way}: {timed.pipelines:,} pipelines x {timed.processes:,} GPUs, {timed.micro_batches:,} "
        f"micro-batches of {work.rows:,} rows x {work.segments:,} segments",
        f"  {timed.seconds:.4g} s a step, {timed.averaging:.3g} s of them averaging gradients; one GPU "
        f"{timed.alone:.4g} s: {timed.faster:,.1f} times as fast, each GPU idle for {timed.idle:.0%} of the time",
        f"  {work.state / 1024:,.1f} KiB of state a row; {timed.message / 1024:,.1f} KiB a message",
        f"  up to {most:,} GPUs a pipeline (of {work.segments:,} segments) they compute for half of the time or more",
    ]


def _as_dict(name: str, work: Work, timed: Timing, most: int) -> dict[str, object]:
    derived = {"faster": timed.faster, "idle": timed.idle, "stops_at": most}
    return {"recipe": name, **dataclasses.asdict(work), **dataclasses.asdict(timed), **derived}
