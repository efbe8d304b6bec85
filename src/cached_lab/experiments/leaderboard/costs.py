"""Costs of memories at the sizes of a leaderboard: counted operations, and CPU time relative to no memory.

All models of a board are timed on the same episodes in one process, in turn, with one thread.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from cached_lab.experiments.costs.flops import flops_of
from cached_lab.experiments.costs.timing import compare, training_step
from cached_lab.experiments.efficiency import NONE, WHOLE, row_name
from cached_lab.experiments.probes.distances import loop_of
from cached_lab.experiments.probes.far_trials import FarTrials
from cached_lab.experiments.probes.protocol import ProbeSizes, build_model
from cached_lab.experiments.probes.trials import Trial
from cached_lab.registries import PROBES

ROUNDS = 7
"""Counted rounds."""


def measure_costs(trials: FarTrials, task: str, rounds: int = ROUNDS) -> dict[str, dict[str, Any]]:
    """Return the costs of each memory and of the arms without one, by name, for texts of the farthest trained distance.

    Returns:
        "flops", operations per token of inference, one multiply-add as two, over all passes; "reading" and "training",
        the time of inference, and of a training step, over that of the model without a memory (`Ratio` as a mapping).
    """
    arms = [Trial(task, "none", arm, 0) for arm in (NONE, WHOLE)]
    for memory in trials.memories:
        arms += [Trial(task, memory, "far", 0), *trials.windows(task, memory, 0)]
    flops, reading, training = {}, {}, {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for trial in arms:
            name = row_name(trial.memory, trial.arm)
            read, train, tokens = _cases(trial, trials.settings(trial), trials)
            flops[name], reading[name], training[name] = flops_of(read) / tokens, read, train
        times = {"reading": compare(reading, NONE, rounds), "training": compare(training, NONE, rounds)}
    finally:
        torch.set_num_threads(threads)
    return {
        name: {"flops": flops[name]} | {kind: dataclasses.asdict(ratios[name]) for kind, ratios in times.items()}
        for name in flops
    }


def _cases(
    trial: Trial, settings: dict[str, Any], trials: FarTrials
) -> tuple[Callable[[], object], Callable[[], object], int]:
    """Return functions for inference and a training step on an episode, and its number of tokens."""
    task, sizes = PROBES.create(trial.task, **settings["task"]), ProbeSizes(**settings["sizes"])
    torch.manual_seed(0)
    model = build_model(task, settings["memory"], sizes)
    loop = loop_of(model, task, trials.course, settings["passes"], trial.arm == WHOLE)
    episode = task.draw(sizes.batch_size, trials.course.farthest, torch.Generator().manual_seed(0))

    def read() -> None:
        model.eval()
        with torch.no_grad():
            loop(*episode)

    return read, training_step(model, lambda: loop(*episode)[0]), episode.inputs_BN.numel()
