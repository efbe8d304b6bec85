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
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cached_lab.experiments.environment import environment
from cached_lab.experiments.subprocesses import stop_with
from cached_lab.registries import PROBES
from cached_lab.training.run_lock import folder_lock
from cached_transformers.files import json_text, write_whole
from cached_transformers.interfaces.probing import Options

from .callbacks import News, Tell
from .protocol import Sizes, probe
from .settings import setting
from .tasks import ProbeTask

MODEL = "model"
"""Beside the names of tasks and memories, in options: sizes of the models, the same for all."""
Result = dict[str, Any]
Hear = Callable[["Trial", News], object]
_PAUSE = 0.1
"""Seconds between two looks at what processes say."""
_telling: list[Connection] = []
"""In a process that trains: the line to the one that shows what it says."""


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

    @property
    def name(self) -> str:
        """What it is, for people."""
        arm = "" if self.arm == "far" else f", {self.arm}"
        return f"{self.task}: {self.arm if self.memory == 'none' else self.memory + arm}, seed {self.seed}"

    def sentence(self, result: dict[str, Any]) -> str:
        """Its result in a line."""
        exact = f" ({100 * result['exact']:.1f} % of episodes)" if "exact" in result else ""
        return (
            f"{self.name}: {100 * result['accuracy']:.1f} % right{exact} after {result['steps']} steps, "
            f"{result['seconds']:.0f} s"
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
        return stored_settings({**settings, "sizes": dataclasses.asdict(sizes), **asked_of(task)})

    def work(self, trial: Trial, settings: dict[str, Any], folder: Path, tell: Tell) -> Result:
        """Train one, tell how it goes, and keep its result."""
        return _train(trial, settings, folder, tell)

    def _options(self, name: str) -> dict[str, Any]:
        return dict(self.options.get(name, {}))

    def _sizes(self) -> Sizes:
        return Sizes(steps=self.steps, short_convolution=self.taps, **self._options(MODEL))

    def _of_memory(
        self, memory: str, options: Options, task: ProbeTask, sizes: Sizes
    ) -> tuple[dict[str, Any], int, Sizes]:
        """With which options a memory is trained, readings of each episode, and sizes: with its own learning rate,
        unless one was chosen for all."""
        spec = {"name": memory, **options(task.segment, self.distance, sizes.depth), **self._options(memory)}
        chosen = setting(memory)
        if chosen.learning_rate is not None and "learning_rate" not in self._options(MODEL):
            sizes = dataclasses.replace(sizes, learning_rate=chosen.learning_rate)
        return spec, chosen.passes, sizes

    def _task(self, name: str) -> ProbeTask:
        task: ProbeTask = PROBES.create(name, **self._options(name))
        return task

    def train(
        self, trials: Sequence[Trial], jobs: int, hear: Hear = lambda trial, news: None
    ) -> Generator[tuple[Trial, Result], None, None]:
        """Train some of them, so many at a time, and give each with its result when it is done.

        Others that are under way end when one fails, when this process does, and when the iterator is closed.

        Args:
            hear: is called with what each says while it works, in this process and before its result is given.

        Raises:
            InUse: another process probes into the folder.
        """
        with folder_lock(self.folder):
            if jobs == 1 or len(trials) < 2:
                for trial in trials:
                    yield trial, self.work(trial, self.settings(trial), self.folder, partial(hear, trial))
                return
            yield from self._train_apart(trials, jobs, hear)

    def _train_apart(
        self, trials: Sequence[Trial], jobs: int, hear: Hear
    ) -> Generator[tuple[Trial, Result], None, None]:
        context = multiprocessing.get_context("spawn")
        theirs, ours = context.Pipe(duplex=False)
        heard, telling = context.Pipe(duplex=False)
        with ProcessPoolExecutor(jobs, context, _begin_apart, (theirs, telling)) as pool:
            try:
                under_way = {pool.submit(_work_apart, self, trial, self.settings(trial)): trial for trial in trials}
                while under_way:
                    wait(under_way, _PAUSE, FIRST_COMPLETED)
                    done = [future for future in under_way if future.done()]
                    while heard.poll():  # whatever came before a result is in the pipe by now
                        hear(*heard.recv())
                    for future in done:
                        yield under_way.pop(future), future.result()
            except BaseException:
                ours.close()
                pool.shutdown(wait=False, cancel_futures=True)
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


def asked_of(task: ProbeTask) -> dict[str, str]:
    """What to keep of a task of files, by which a training that was asked of its own stories is not taken for one."""
    return {} if task.part("test") is task else {"asked": "test"}


def stored_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as they are read back from a file."""
    read: dict[str, Any] = json.loads(json.dumps(settings))
    return read


def _begin_apart(line: Connection, telling: Connection) -> None:
    stop_with(line)
    _telling.append(telling)


def _work_apart(trials: Trials, trial: Trial, settings: dict[str, Any]) -> Result:
    return trials.work(trial, settings, trials.folder, lambda news: _telling[0].send((trial, news)))


def _train(trial: Trial, settings: dict[str, Any], folder: Path, tell: Tell) -> Result:
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
        tell=tell,
    )
    result = {"settings": settings, "chance": task.chance, "memory": settings["memory"], **dataclasses.asdict(outcome)}
    path = folder / trial.path
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json_text(result))
    return result


def _finished(path: Path, settings: dict[str, Any]) -> bool:
    return path.is_file() and json.loads(path.read_text(encoding="utf-8"))["settings"] == settings
