"""The most bytes that the real training of a recipe holds at once on the CPU, by the allocator's own account."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from cached_lab.data.pairs import PairBatch
from cached_lab.experiments.build import build_dataset, build_model
from cached_lab.tasks.kinds import make_task
from cached_lab.tasks.recipes import fill_from_data, load_config
from cached_lab.training.distributed import World
from cached_lab.training.progress import Reporter
from cached_lab.training.trainer import Trainer

STEPS = 2
"""The second has the states of the optimiser, and of the rows, that the first made."""


def measured(name: str, overrides: list[str], folder: Path) -> tuple[int, int]:
    """Bytes of model, trainer and two steps at their highest; and the tokens of the longest row of these steps.

    `torch.profiler` records every request to the allocator, those inside of kernels too, and every return.
    """
    config = load_config(name, overrides)
    train, validation = (build_dataset(config, split) for split in ("train", "validation"))
    config = fill_from_data(config, train.describe())
    world, longest = World(torch.device("cpu")), 0
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = build_model(config)
        task = make_task(config, model, train, validation, world)
        trainer = Trainer(config, task, folder, world, Reporter(config.name, STEPS, None))
        wrapped, runner = task.runner()
        batches = task.batches(0)
        drawn: list[Any] = []

        def watched() -> Any:
            for batch in batches:
                drawn.append(_longest(batch))
                yield batch

        watching = watched()
        for _ in range(STEPS):
            trainer._train_step(wrapped, runner, watching)
    longest = max(drawn)
    assert trainer.skipped == 0
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    requests = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    now = peak = 0
    for _, size in requests:
        now += size
        peak = max(peak, now)
    return peak, longest


def _longest(batch: Any) -> int:
    pairs = getattr(batch, "pairs", batch)
    if isinstance(pairs, PairBatch):
        return max(pairs.inputs.shape[1], pairs.targets.shape[1])
    return int(batch.inputs.shape[1])
