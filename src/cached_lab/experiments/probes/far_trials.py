"""Probes by distance: every memory is trained at many distances, and then asked after texts of any length.

Three kinds of training stand side by side, with the same sizes, seeds and steps: with the memory; without one, every
segment read alone; and, once, attention over the whole text, which shows that the task can be learned. A training is
kept with its weights, and each answer as soon as there is one, so that a longer text later costs the longer text alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from cached_lab.experiments.environment import environment
from cached_lab.registries import PROBES
from cached_transformers.files import json_text, write_whole
from cached_transformers.state import nbytes

from .callbacks import Answer, Tell
from .distances import Course, Trained, holds, ladder, train_by_distance
from .protocol import Sizes, build_model
from .settings import setting
from .trials import Trial, Trials, asked_of, stored_settings

NONE, WHOLE = "no memory", "whole text"
"""The arms without a memory: each segment alone, and attention over everything."""
NEAR_A_GUESS = 0.25
"""Share of what there is above chance that a memory must still know; with less, it is asked nothing farther."""
LONG = 10_000
"""Segments of a text from which on a compiled model pays for its making."""


@dataclass(frozen=True)
class FarTrials(Trials):
    """What is probed by distance; `distance` is the farthest of the course.

    Attributes:
        course: distances of the training. begin_near: whether it begins at the nearest distance that the task at hand
            has, in the place of that of the course. far: tokens of the longest text that is asked about.
        rows: texts that are asked about at each distance. compiled: whether long texts are read by a compiled model,
            which takes a minute to make and then about half the time a segment. ceiling: whether attention over the
            whole text is trained, too; its work grows with the square of the text.
    """

    course: Course = dataclasses.field(default_factory=Course)
    far: int = 1_000_000
    rows: int = 64
    compiled: bool = False
    ceiling: bool = True
    begin_near: bool = False

    def __post_init__(self) -> None:
        for memory in self.memories:
            if (passes := setting(memory).passes) > 1 and self.course.bptt_window == "sliding":
                raise ValueError(
                    f"memory {memory} is read in {passes} passes, which have no sliding windows; leave it or "
                    "--bptt-window out"
                )

    def all(self) -> list[Trial]:
        trials = []
        for seed, task in itertools.product(range(self.seeds), self.tasks):
            arms = (NONE, WHOLE) if self.ceiling and not seed else (NONE,)
            trials += [Trial(task, "none", arm, seed) for arm in arms]
            trials += [Trial(task, memory, "far", seed) for memory in self.memories]
        return trials

    def missing(self) -> list[Trial]:
        return [trial for trial in self.all() if not self._answered(trial)]

    def _answered(self, trial: Trial) -> bool:
        """Whether the training is there, and every answer up to the longest text, or to the one where it ends."""
        path = self.folder / trial.path
        if not path.is_file():
            return False
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["settings"] != self.settings(trial):
            return False
        return not _unasked(stored, self.distances(trial), self.rows)

    def distances(self, trial: Trial) -> list[int]:
        """Distances that are asked about: those of the ladder, and the farthest of the training."""
        task, farthest = self._task(trial.task).part("test"), self.course.farthest
        asked = ladder(task.segment, farthest * task.segment if trial.arm == WHOLE else self.far)
        return [distance for distance in sorted({*asked, min(farthest, asked[-1])}) if task.has(distance)]

    def settings(self, trial: Trial) -> dict[str, Any]:
        task, sizes = self._task(trial.task), self._sizes()
        course = dataclasses.replace(self.course, nearest=task.shortest) if self.begin_near else self.course
        for distance in (course.nearest, course.farthest):
            task.segments(distance)
        spec, passes = None, 1
        if trial.arm == "far":
            spec, passes, sizes = self._of_memory(trial.memory, setting(trial.memory).far, task, sizes)
        if trial.arm != "far":
            course = dataclasses.replace(course, recall=0.0)  # which is of a memory
        kept, sizes_ = course.settings(), dataclasses.asdict(sizes)
        return stored_settings(
            {"task": self._options(trial.task), "memory": spec, "passes": passes, "course": kept, "sizes": sizes_}
            | asked_of(task)
        )

    def content(self, command: str) -> dict[str, Any]:
        """All that is known, as files and pages have it."""
        return self._written(command) | {
            "course": dataclasses.asdict(self.course) | {"through": [*self.course.through]},
            "far": self.far,
            "taps": self.taps,
            "rows": self.rows,
            "segments": {task: self._task(task).segment for task in self.tasks},
            "asked": {task: PROBES.entry(task).summary for task in self.tasks},
        }

    def write(self, command: str) -> dict[str, Any]:
        """Write far.json, and return what it holds."""
        result = self.content(command)
        write_whole(self.folder / "far.json", json_text(result))
        return result

    def work(self, trial: Trial, settings: dict[str, Any], folder: Path, tell: Tell) -> dict[str, Any]:
        return _train_and_ask(trial, settings, folder, self.distances(trial), self.rows, self.compiled, tell)


def _unasked(stored: dict[str, Any], distances: Sequence[int], rows: int) -> list[int]:
    """Distances that are still to be asked about, in so many texts; none behind one where it is as good as a guess.

    The model without a memory, which costs little to ask, has no such end.
    """
    chance = stored["chance"]
    answers = {int(d): share for d, (share, _, texts) in stored["far"].items() if texts >= rows}
    if stored["memory"] is None:
        return [distance for distance in distances if distance not in answers]
    for index, distance in enumerate(distances):
        if distance not in answers:
            return list(distances[index:])
        if distance > stored["settings"]["course"]["farthest"] and answers[distance] < chance + NEAR_A_GUESS * (
            1 - chance
        ):
            return []
    return []


def _train_and_ask(
    trial: Trial,
    settings: dict[str, Any],
    folder: Path,
    distances: Sequence[int],
    rows: int,
    compiled: bool,
    tell: Tell,
) -> dict[str, Any]:
    """Train one, or take up what was trained, and ask about each distance; every answer is kept at once."""
    torch.set_num_threads(1)
    path = folder / trial.path
    task, sizes, course = (
        PROBES.create(trial.task, **settings["task"]),
        Sizes(**settings["sizes"]),
        Course(**settings["course"]),
    )
    how = {"passes": settings["passes"], "whole": trial.arm == WHOLE}
    torch.manual_seed(trial.seed)
    model = build_model(task, settings["memory"], sizes)
    stored = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    weights = path.with_suffix(".safetensors")
    if stored is not None and stored["settings"] == settings and weights.is_file():
        model.load_state_dict(safetensors.torch.load_file(weights))
    else:
        started = time.perf_counter()
        trained = train_by_distance(model, task, course, sizes, seed=trial.seed, tell=tell, **how)
        stored = _result(settings, task.chance, trained, model, time.perf_counter() - started)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: t.detach().clone() for name, t in model.state_dict().items()}  # tied ones apart
        path.unlink(missing_ok=True)  # a run that ends here must not leave new weights beside the result of others
        write_whole(weights, safetensors.torch.save(tensors))
        write_whole(path, json_text(stored))
    while unasked := _unasked(stored, distances, rows):
        started, distance = time.perf_counter(), unasked[0]
        alone = trial.arm == NONE  # of which only segments that ask are read: nothing to be gained by compiling
        reader = torch.compile(model, dynamic=False) if compiled and distance >= LONG and not alone else model
        answers = holds(reader, task, distance, rows, alone=alone, **how)
        stored["far"][str(distance)] = [*answers, rows]
        stored["seconds_far"] += time.perf_counter() - started
        write_whole(path, json_text(stored))
        tell(Answer(distance * task.segment, answers[0]))
    return stored


def _result(
    settings: dict[str, Any], chance: float, trained: Trained, model: nn.Module, seconds: float
) -> dict[str, Any]:
    return {
        "settings": settings,
        "chance": chance,
        "memory": settings["memory"],
        **dataclasses.asdict(trained),
        "seconds": seconds,
        "parameters": sum(p.numel() for p in model.parameters()),
        "state_bytes": nbytes(model.init_state(1)),  # type: ignore[operator]
        "environment": environment("cpu"),
        "far": {},
        "seconds_far": 0.0,
    }
