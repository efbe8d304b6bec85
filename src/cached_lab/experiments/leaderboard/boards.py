"""The board: the probe tasks of the leaderboard with their sizes, distances, steps and seeds.

Trainings and their records are those of `cached probe --train-distance` (`FarTrials`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cached_lab.experiments.probes.distances import Course
from cached_lab.experiments.probes.far_trials import FarTrials
from cached_lab.experiments.probes.settings import MODEL
from cached_lab.registries import PROBES

NAME = "quick"
TASKS: dict[str, dict[str, Any]] = {  # segments with room for distance 0
    "latch": {"segment": 8, "decoys": True},
    "copy": {"segment": 8, "length": 4},
    "mqar": {"segment": 16},
    "rewrite": {"segment": 12},
}
SIZES: dict[str, Any] = {"heads": 2}
"""Sizes of the models: with 4 heads of 8 channels, many memories never find a key."""
FARTHEST, FAR = 3, 512
"""Segments between cue and question in training, and tokens of the longest tested text."""
ROWS, TAPS = 256, 3
"""Texts for each share (an interval of at most 12 points), and tokens of the short convolution."""
STEPS, SEEDS = 800, 1


def board_trials(
    memories: Sequence[str],
    tasks: Sequence[str],
    folder: Path,
    options: Mapping[str, Mapping[str, Any]],
    *,
    seeds: int | None = None,
    steps: int | None = None,
    controls: Sequence[str] = (),
) -> FarTrials:
    """Return the trainings of these memories and tasks; `options` override those of the board."""
    own = {**TASKS, MODEL: SIZES}
    merged = {name: {**own.get(name, {}), **options.get(name, {})} for name in {*tasks, *options, MODEL}}
    return FarTrials(
        memories,
        tasks,
        FARTHEST,
        seeds or SEEDS,
        steps or STEPS,
        folder,
        {name: chosen for name, chosen in merged.items() if chosen},
        TAPS,
        course=Course(1, FARTHEST),
        begin_near=True,
        far=max([FAR, *(FARTHEST * PROBES.create(task, **merged[task]).segment for task in tasks)]),
        rows=ROWS,
        controls=controls,
    )
