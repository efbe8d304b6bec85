"""Which probes by distance a leaderboard is made of: tasks with their sizes, distances, steps and seeds.

A board is a choice, and nothing else: trainings, what is kept of them and what a memory needs for distance are those of
`cached probe --train-distance` (`FarTrials`).
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
"""Texts behind each share: an interval of 12 points at the widest; and tokens of the short convolution, as of `cached
probe --train-distance`."""

SIZES: dict[str, Any] = {"heads": 2}
"""Of the models: with heads of 8 channels, as 4 of them would be, keys are found late, and by many memories never."""


@dataclass(frozen=True)
class Board:
    """A choice of probes by distance.

    Attributes:
        tasks: names, and the options that make them small. farthest: segments between cue and question in training.
        far: tokens of the longest text that is asked about. why: how the choice was made, for the page.
    """

    tasks: Mapping[str, Mapping[str, Any]]
    farthest: int
    far: int
    steps: int
    seeds: int
    why: str

    def reason(self, trials: FarTrials) -> str:
        """How these trainings were chosen."""
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
        """The trainings of these memories and tasks; `options` of either come on top of the board's."""
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
        why="one task of each kind that a model of this size learns in a few hundred steps, and segments so short that "
        "a training takes less than a minute of a core; one seed, so that differences of a few points say nothing",
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
"""The boards by their names."""
