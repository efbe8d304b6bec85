"""Boards: the probe tasks of a leaderboard with their sizes, distances, steps and seeds.

Trainings and their records are those of `cached probe --train-distance` (`FarTrials`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cached_lab.experiments.probes.distances import Course
from cached_lab.experiments.probes.far_trials import FarTrials
from cached_lab.experiments.probes.trials import MODEL
from cached_lab.registries import PROBES

ROWS, TAPS = 256, 3
"""Texts for each share (an interval of at most 12 points), and tokens of the short convolution."""
SIZES: dict[str, Any] = {"heads": 2}
"""Sizes of the models: with 4 heads of 8 channels, many memories never find a key."""


@dataclass(frozen=True)
class Board:
    """A choice of probes by distance.

    Attributes:
        tasks: names, and options that make them small. farthest: segments between cue and question in training.
        far: tokens of the longest tested text. why: reason for the choice, for the page.
    """

    tasks: Mapping[str, Mapping[str, Any]]
    farthest: int
    far: int
    steps: int
    seeds: int
    why: str

    def reason(self, trials: FarTrials) -> str:
        """Return the reason for the choice of these trainings."""
        own = self.trials(trials.memories, list(self.tasks), trials.folder, {})
        same = all(getattr(own, key) == getattr(trials, key) for key in ("tasks", "seeds", "steps", "options"))
        return self.why if same else "changed as the command says"

    def trials(
        self,
        memories: Sequence[str],
        tasks: Sequence[str],
        folder: Path,
        options: Mapping[str, Mapping[str, Any]],
        *,
        seeds: int | None = None,
        steps: int | None = None,
    ) -> FarTrials:
        """Return the trainings of these memories and tasks; `options` override those of the board."""
        own = {**self.tasks, MODEL: SIZES}
        merged: dict[str, dict[str, Any]] = {
            name: {**own.get(name, {}), **options.get(name, {})} for name in {*tasks, *options, MODEL}
        }
        return FarTrials(
            memories,
            tasks,
            self.farthest,
            seeds or self.seeds,
            steps or self.steps,
            folder,
            {name: chosen for name, chosen in merged.items() if chosen},
            TAPS,
            course=Course(1, self.farthest),
            begin_near=True,
            far=max([self.far, *(self.farthest * PROBES.create(task, **merged[task]).segment for task in tasks)]),
            rows=ROWS,
        )


_SMALL: dict[str, dict[str, Any]] = {  # segments with room for distance 0
    "latch": {"segment": 8, "decoys": True},
    "copy": {"segment": 8, "length": 4},
    "mqar": {"segment": 16},
    "rewrite": {"segment": 12},
}
BOARDS = {
    "quick": Board(
        _SMALL,
        farthest=3,
        far=512,
        steps=800,
        seeds=1,
        why="one task of each kind that a model of this size learns in a few hundred steps, with short segments, so "
        "that a training takes less than a minute of a core; with one seed, differences of a few points mean nothing",
    ),
    "full": Board(
        {**_SMALL, "detect": {}, "variable_tracking": {"hops": 2}},
        farthest=5,
        far=4096,
        steps=2000,
        seeds=3,
        why="two more tasks, longer distances, and as many steps and seeds as a night on two cores allows, --jobs 2",
    ),
}
"""Boards by name."""
