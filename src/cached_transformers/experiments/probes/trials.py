"""Many probes: every memory on every task, within its reach, out of it, and left out; each result in a file.

Finished trainings are kept, with all that determines their results, so that the same probes go on where they stopped,
and a changed setting makes its trainings anew.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import multiprocessing
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cached_transformers.experiments.children import stop_with
from cached_transformers.experiments.environment import environment
from cached_transformers.files import json_text, write_whole
from cached_transformers.registry import MEMORIES, PROBES, unknown_name
from cached_transformers.seam.probing import Options
from cached_transformers.training.run_lock import folder_lock
from cached_transformers.yaml_tree import apply_override

from .protocol import Sizes, probe
from .settings import setting, stream_memories
from .tasks import ProbeTask

FILES = ("babi", "books")
"""Options of tasks that read files: bAbI's, and books."""
MODEL = "model"
"""Beside the names of tasks and memories, in options: sizes of the models, the same for all."""
SIZES = ("width", "depth", "heads", "feed_forward", "batch_size", "learning_rate")
"""Those of `Sizes` that may be set."""


class Trial(NamedTuple):
    """One training: a task, a memory ("none" for none), how far it reaches, a seed."""

    task: str
    memory: str
    arm: str
    seed: int

    @property
    def path(self) -> str:
        """Where its result is kept."""
        name = "no_memory" if self.memory == "none" else self.memory
        return f"{self.task}/{name}/{self.arm.replace(' ', '_')}_{self.seed}.json"

    def sentence(self, result: dict[str, Any]) -> str:
        """Its result in a line."""
        what = self.arm if self.memory == "none" else f"{self.memory}, {self.arm}"
        exact = f" ({100 * result['exact']:.1f} % of episodes)" if "exact" in result else ""
        return (
            f"{self.task}: {what}, seed {self.seed}: {100 * result['accuracy']:.1f} % right{exact} after "
            f"{result['steps']} steps, {result['seconds']:.0f} s"
        )


@dataclasses.dataclass(frozen=True)
class Trials:
    """What is probed.

    Attributes:
        steps: the most of a training. options: of tasks and memories, by their names; those of a memory come on top of
            what its registration says, and those of "model" are fields of `Sizes`, the same for all.
        taps: of the short convolution in front of attention, the same for all; 1 for none.
    """

    memories: Sequence[str]
    tasks: Sequence[str]
    distance: int
    seeds: int
    steps: int
    folder: Path
    options: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    taps: int = 1

    def all(self) -> list[Trial]:
        """Every training, seed by seed and task by task."""
        trials = []
        for seed, task in itertools.product(range(self.seeds), self.tasks):
            trials.append(Trial(task, "none", "no memory", seed))
            for memory in self.memories:
                trials.append(Trial(task, memory, "within reach", seed))
                if setting(memory).beyond is not None and self.taps == 1:  # taps reach beyond the bound
                    trials.append(Trial(task, memory, "out of reach", seed))
        return trials

    def missing(self) -> list[Trial]:
        """Those without a result of their settings."""
        return [trial for trial in self.all() if not _finished(self.folder / trial.path, self.settings(trial))]

    def settings(self, trial: Trial) -> dict[str, Any]:
        """Everything that determines the result of a trial; kept beside it, so that a change makes it be trained anew.

        Raises:
            ValueError: the task or the memory's options do not go with the distance.
        """
        task, sizes = self._task(trial.task), self._sizes()
        task.segments(self.distance)
        spec, passes = None, 1
        if trial.arm != "no memory":
            chosen = setting(trial.memory)
            options = chosen.within if trial.arm == "within reach" else chosen.beyond
            assert options is not None
            spec, passes, sizes = self._of_memory(trial.memory, options, task, sizes)
        settings = {"task": self._options(trial.task), "distance": self.distance, "memory": spec, "passes": passes}
        return stored_settings({**settings, "sizes": dataclasses.asdict(sizes)})

    def work(self, trial: Trial, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Train one, and keep its result."""
        return _train(trial, settings, folder)

    def _options(self, name: str) -> dict[str, Any]:
        return dict(self.options.get(name, {}))

    def _sizes(self) -> Sizes:
        return Sizes(steps=self.steps, short_convolution=self.taps, **self._options(MODEL))

    def _of_memory(
        self, memory: str, options: Options, task: ProbeTask, sizes: Sizes
    ) -> tuple[dict[str, Any], int, Sizes]:
        """With which options a memory is trained, readings of each episode, and sizes with its own learning rate."""
        spec = {"name": memory, **options(task.segment, self.distance, sizes.depth), **self._options(memory)}
        chosen = setting(memory)
        if chosen.learning_rate is not None and "learning_rate" not in self._options(MODEL):
            sizes = dataclasses.replace(sizes, learning_rate=chosen.learning_rate)
        return spec, chosen.passes, sizes

    def _task(self, name: str) -> ProbeTask:
        task: ProbeTask = PROBES.create(name, **self._options(name))
        return task

    def train(self, trials: Sequence[Trial], jobs: int) -> Generator[tuple[Trial, dict[str, Any]], None, None]:
        """Train some of them, so many at a time, and give each with its result when it is done.

        Others that are under way end when one fails, when this process does, and when the iterator is closed.

        Raises:
            InUse: another process probes into the folder.
        """
        with folder_lock(self.folder):
            if jobs == 1 or len(trials) < 2:
                for trial in trials:
                    yield trial, self.work(trial, self.settings(trial), self.folder)
                return
            context = multiprocessing.get_context("spawn")
            theirs, ours = context.Pipe(duplex=False)
            with ProcessPoolExecutor(jobs, context, stop_with, (theirs,)) as pool:
                try:
                    settings = [self.settings(trial) for trial in trials]
                    results = pool.map(self.work, trials, settings, itertools.repeat(self.folder))
                    yield from zip(trials, results, strict=True)
                except BaseException:
                    ours.close()
                    raise

    def write(self, command: str) -> dict[str, Any]:
        """Write probe.json, and return what it holds."""
        result = self._written(command) | {"distance": self.distance, "notes": self._notes()}
        write_whole(self.folder / "probe.json", json_text(result))
        return result

    def _written(self, command: str) -> dict[str, Any]:
        """What was probed, how and where, and every result."""
        results = []
        for trial in self.all():
            stored = json.loads((self.folder / trial.path).read_text(encoding="utf-8"))
            results.append({**trial._asdict(), **stored, "options": stored["memory"], "memory": trial.memory})
        return {
            "command": command,
            "date": datetime.date.today().isoformat(),
            "environment": environment("cpu"),
            "memories": list(self.memories),
            "tasks": list(self.tasks),
            "seeds": self.seeds,
            "results": results,
        }

    def _notes(self) -> dict[str, str]:
        """What else to know, by memory and task."""
        notes = {memory: setting(memory).why for memory in self.memories if setting(memory).why}
        for name in self.tasks:
            task = self._task(name)
            if (share := task.without_first(self.distance)) > task.chance:
                notes[name] = f"without the first segment alone a memory can still be right in {100 * share:.1f} %"
        return notes


def chosen_memories(text: str) -> list[str]:
    """Memories from names with commas between them, or "all"."""
    able = stream_memories()
    names = able if text == "all" else text.split(",")
    for name in names:
        MEMORIES.entry(name)
        if name not in able:
            raise ValueError(
                f"memory {name!r} keeps nothing for each row of a stream, so there is nothing to probe; "
                f"take one of {', '.join(able)}"
            )
    return names


def chosen_tasks(text: str, files: Mapping[str, str], overrides: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Tasks from names with commas between them, or "all", and the options of each.

    Args:
        files: "babi" and "books", for the tasks that have such options; "all" are those that need no more.
        overrides: options as `task.option=value`.

    Raises:
        ValueError: an unknown task or option, a value of another type, an option of a task that is not among them, or
            a task without its files.
    """
    missing = {
        entry.name: {key for key in FILES if (o := entry.options.get(key)) is not None and o.default is o.empty}
        for entry in PROBES
    }
    names = PROBES.names() if text == "all" else text.split(",")
    if text == "all":
        names = [name for name in names if missing[name] <= set(files)]
    tasks = {name: {key: files[key] for key in FILES if key in files and key in _options(name)} for name in names}
    for override in overrides:
        task = override.partition("=")[0].partition(".")[0]
        if task not in tasks:
            raise ValueError(
                f"{override!r} sets an option of {task!r}, which is neither among the memories nor among the tasks "
                f"{', '.join(tasks)}; write NAME.option=value, and give a task with --tasks"
            )
        apply_override(tasks, override)
    for name, options in tasks.items():
        if not isinstance(options, dict):
            raise ValueError(f"{name}={options!r} sets no option; write {name}.option=value")
        PROBES.check(name, options, name)
        if not missing[name] <= set(options):
            raise ValueError(f"the task {name!r} reads files: give --babi ARCHIVE_OR_FOLDER and --books FOLDER")
    return tasks


def options_of_memories(memories: Sequence[str], overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The options of memories that are set by `memory.option=value`.

    Raises:
        ValueError: an unknown option or preset, or a value of another type.
    """
    found: dict[str, Any] = {name: {} for name in memories}
    for override in overrides:
        apply_override(found, override)
    for name, options in found.items():
        if not isinstance(options, dict):
            raise ValueError(f"{name}={options!r} sets no option; write {name}.option=value")
        found[name] = MEMORIES.with_preset(name, options)
        MEMORIES.check(name, found[name], name)
    return {name: options for name, options in found.items() if options}


def options_of_models(overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Sizes of the models that are set by `model.option=value`.

    Raises:
        ValueError: an unknown size, or one that is not a number above 0.
    """
    found: dict[str, Any] = {MODEL: {}}
    for override in overrides:
        apply_override(found, override)
    sizes = found[MODEL] if isinstance(found[MODEL], dict) else {MODEL: found[MODEL]}
    for name, value in sizes.items():
        if name not in SIZES:
            raise ValueError(unknown_name("size of the probed model", name, list(SIZES)))
        kinds = (int, float) if name == "learning_rate" else int
        if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0:
            raise ValueError(f"{MODEL}.{name}={value!r} must be a number above 0")
    return {MODEL: sizes} if sizes else {}


def _options(task: str) -> Mapping[str, Any]:
    if task not in PROBES:
        raise ValueError(unknown_name("probe task", task, PROBES.names()))
    return PROBES.entry(task).options


def stored_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as they are read back from a file."""
    read: dict[str, Any] = json.loads(json.dumps(settings))
    return read


def _train(trial: Trial, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    task, distance = PROBES.create(trial.task, **settings["task"]), settings["distance"]
    outcome = probe(
        task,
        settings["memory"],
        distance,
        seed=trial.seed,
        sizes=Sizes(**settings["sizes"]),
        passes=settings["passes"],
        distances=[other for other in range(1, 2 * distance + 1) if task.has(other)],
    )
    result = {"settings": settings, "chance": task.chance, "memory": settings["memory"], **dataclasses.asdict(outcome)}
    path = folder / trial.path
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json_text(result))
    return result


def _finished(path: Path, settings: dict[str, Any]) -> bool:
    return path.is_file() and json.loads(path.read_text(encoding="utf-8"))["settings"] == settings
