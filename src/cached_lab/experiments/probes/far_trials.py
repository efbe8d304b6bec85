"""Probes by distance: every memory is trained at many distances, and then asked about texts of any length.

Three kinds of training have the same sizes, seeds and steps: with the memory; without one, every segment read
separately; and, once, attention over the whole text, which shows that the task can be learned. The weights of a
training are stored, and each answer as soon as it is counted, so a longer text later costs only that text.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import safetensors.torch
import torch
from safetensors import SafetensorError

from cached_lab.data.archives import naming
from cached_lab.experiments.efficiency import NONE, WHOLE, WINDOW
from cached_lab.experiments.environment import environment
from cached_lab.registries import PROBES
from cached_transformers.files import json_text, write_whole
from cached_transformers.state import nbytes

from .distances import Course, ladder, train_by_distance
from .protocol import ProbeSizes, build_model, score
from .settings import setting
from .trials import Result, Trial, Trials

NEAR_A_GUESS = 0.25
"""Share of the accuracy above chance below which a memory is asked about no farther distance."""
ROUNDED = 2
"""Texts of a distance whose answers may differ from the record of a merged training."""
LONG = 10_000
"""Segments of a text from which on compiling the model pays."""


@dataclass(frozen=True)
class FarTrials(Trials):
    """A set of probes by distance; `distance` is the farthest of the course.

    Attributes:
        course: distances of the training. begin_near: start at the nearest distance of each task instead of the
            course's. far: tokens of the longest text.
        rows: texts at each distance. compiled: read long texts with a compiled model, which takes a minute to compile
            and then about half the time per segment. ceiling: also train attention over the whole text; its work grows
            with the square of the text.
    """

    course: Course = dataclasses.field(default_factory=Course)
    far: int = 1_000_000
    rows: int = 64
    compiled: bool = False
    ceiling: bool = True
    begin_near: bool = False
    file: ClassVar[str] = "far.json"

    def all(self) -> list[Trial]:
        trials = []
        for seed, task in itertools.product(range(self.seeds), self.tasks):
            arms = (NONE, WHOLE) if self.ceiling and not seed else (NONE,)
            trials += [Trial(task, "none", arm, seed) for arm in arms]
            for memory in self.memories:
                trials += [Trial(task, memory, "far", seed), *self.windows(task, memory, seed)]
        return trials

    def missing(self) -> list[Trial]:
        """Return the trials that lack their training, or an answer up to the longest text or the first bad one."""
        stored = {trial: self.stored(trial) for trial in self.all()}
        return [t for t, result in stored.items() if result is None or _unasked(result, self.distances(t), self.rows)]

    def distances(self, trial: Trial) -> list[int]:
        """Return the measured distances: those of the ladder, and the farthest of the training."""
        task, farthest = self.task(trial.task), self.course.farthest
        asked = ladder(task.segment, farthest * task.segment if trial.arm == WHOLE else self.far)
        return [distance for distance in sorted({*asked, min(farthest, asked[-1])}) if task.has(distance)]

    def settings(self, trial: Trial) -> dict[str, Any]:
        task, far = self.task(trial.task), setting(trial.memory).far if trial.arm in ("far", WINDOW) else None
        course = dataclasses.replace(self.course, nearest=task.shortest) if self.begin_near else self.course
        for distance in (course.nearest, course.farthest):
            task.segments(distance)
        if far is None:
            course = dataclasses.replace(course, recall=0.0)  # there is no memory to reconstruct from
        return self._settings(trial, far, course=dataclasses.asdict(course))

    def content(self, command: str) -> Result:
        return super().content(command) | {
            "course": dataclasses.asdict(self.course),
            "far": self.far,
            "taps": self.taps,
            "rows": self.rows,
            "segments": {task: self.task(task).segment for task in self.tasks},
            "asked": {task: PROBES.entry(task).summary for task in self.tasks},
        }

    def work(self, trial: Trial, settings: dict[str, Any]) -> Result:
        """Train a model, or load a trained one, and measure each distance; write every answer at once."""
        torch.set_num_threads(1)
        path, task = self.folder / trial.path, self.task(trial.task)
        how = {"passes": settings["passes"], "whole": trial.arm == WHOLE}
        sizes, course = ProbeSizes(**settings["sizes"]), Course(**settings["course"])
        torch.manual_seed(trial.seed)
        model = build_model(task, settings["memory"], sizes)
        stored, weights = self.stored(trial), path.with_suffix(".safetensors")
        if stored is not None and weights.is_file():
            model.load_state_dict(safetensors.torch.load_file(weights))
        else:
            started = time.perf_counter()
            trained = train_by_distance(model, task, course, sizes, seed=trial.seed, say=trial.say, **how)
            stored = {
                "settings": settings,
                "chance": task.chance,
                **dataclasses.asdict(trained),
                "seconds": time.perf_counter() - started,
                "parameters": sum(p.numel() for p in model.parameters()),
                "state_bytes": nbytes(model.init_state(1)),  # type: ignore[operator]
                "environment": environment("cpu"),
                "far": {},
                "seconds_far": 0.0,
            }
            path.parent.mkdir(parents=True, exist_ok=True)
            tensors = {name: t.detach().clone() for name, t in model.state_dict().items()}  # separates tied tensors
            path.unlink(missing_ok=True)  # a run killed here must not leave new weights with an old result
            write_whole(weights, safetensors.torch.save(tensors))
            write_whole(path, json_text(stored))
        while unasked := _unasked(stored, self.distances(trial), self.rows):
            started, distance = time.perf_counter(), unasked[0]
            stateless = trial.arm == NONE  # it reads only segments with questions: compiling gains nothing
            compiled = self.compiled and distance >= LONG and not stateless
            reader: Any = torch.compile(model, dynamic=False) if compiled else model
            answers = score(reader, task.part("test"), distance, self.rows, stateless=stateless, **how)
            stored["far"][str(distance)] = [*answers, self.rows]
            stored["seconds_far"] += time.perf_counter() - started
            write_whole(path, json_text(stored))
            trial.say(f"{100 * answers.accuracy:.1f} % right, {distance * task.segment:,} tokens after the cue")
        return stored

    def merge(self, folder: Path) -> Iterator[Trial]:
        """Take over missing trainings from a folder of the same command, and yield them.

        The weights of each are loaded, and all its answers are counted again on the same texts; steps and solved stages
        are taken as recorded.

        Raises:
            ValueError: a training of other settings, or damaged; its record says other sizes or other answers.
        """
        given = dataclasses.replace(self, folder=folder)
        for trial in self.missing():
            path = folder / trial.path
            if not path.is_file():
                continue
            try:
                with naming(path, "training"):
                    result, tensors = given.stored(trial), safetensors.torch.load_file(path.with_suffix(".safetensors"))
            except SafetensorError as error:
                raise ValueError(f"{path}: its weights are damaged ({error}); fetch them again") from error
            if result is None:
                raise ValueError(f"{path}: it has other settings than this board; repeat it with the same options")
            if not isinstance(result.get("far"), dict):
                raise ValueError(f"{path}: it has no answers; the training is damaged, fetch it again")
            self._refuse_other(trial, result, tensors, path)
            (self.folder / trial.path).parent.mkdir(parents=True, exist_ok=True)
            write_whole((self.folder / trial.path).with_suffix(".safetensors"), safetensors.torch.save(tensors))
            write_whole(self.folder / trial.path, json_text(result))
            yield trial

    def _refuse_other(self, trial: Trial, result: Result, tensors: dict[str, torch.Tensor], path: Path) -> None:
        """Refuse (ValueError) a result that its weights do not give."""
        task, settings = self.task(trial.task), self.settings(trial)
        model = build_model(task, settings["memory"], ProbeSizes(**settings["sizes"]))
        try:
            model.load_state_dict(tensors)
        except RuntimeError as error:
            raise ValueError(f"{path}: its weights do not fit its memory ({error})") from error
        sizes = {"chance": task.chance, "state_bytes": nbytes(model.init_state(1))}  # type: ignore[operator]
        sizes["parameters"] = sum(p.numel() for p in model.parameters())
        for name, size in sizes.items():
            if result.get(name) != size:
                raise ValueError(f"{path}: {name}={result.get(name)}, and its weights have {size}")
        how = {"passes": settings["passes"], "whole": trial.arm == WHOLE, "stateless": trial.arm == NONE}
        for distance, (share, _, rows) in result["far"].items():
            found = score(model, task.part("test"), int(distance), rows, **how).accuracy
            if abs(found - share) > ROUNDED / rows:  # another processor may round another way
                raise ValueError(f"{path}: {share:.4f} of answers right at {distance} segments, counted {found:.4f}")


def _unasked(stored: Result, distances: Sequence[int], rows: int) -> list[int]:
    """Return the distances that lack an answer from `rows` texts, up to the first distance with answers near a guess.

    The model without a memory, which costs little to ask, has no such end.
    """
    chance = stored["chance"]
    answers = {int(d): share for d, (share, _, texts) in stored["far"].items() if texts >= rows}
    if stored["settings"]["memory"] is None:
        return [distance for distance in distances if distance not in answers]
    least = chance + NEAR_A_GUESS * (1 - chance)
    for index, distance in enumerate(distances):
        if distance not in answers:
            return list(distances[index:])
        if distance > stored["settings"]["course"]["farthest"] and answers[distance] < least:
            return []
    return []
