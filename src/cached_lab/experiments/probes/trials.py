"""Many probes: every memory on every task, within its reach, out of it, and left out; each result in a file.

Each finished training is stored with everything that determines its result. The same probes therefore continue after
an interruption, and a changed setting repeats its trainings.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import multiprocessing
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from cached_lab.experiments.efficiency import NONE, WHOLE, WINDOW, probe_efficiencies, window_of
from cached_lab.experiments.environment import environment
from cached_lab.experiments.subprocesses import stop_after
from cached_lab.registries import PROBES
from cached_lab.training.run_lock import folder_lock
from cached_transformers.files import json_text, write_whole
from cached_transformers.interfaces.probing import Options

from .protocol import ProbeSizes, build_model, probe
from .settings import MODEL, setting
from .tasks import ProbeTask

Result = dict[str, Any]
CONTROLS = ("whole", "window")


class Trial(NamedTuple):
    """One training: a task, a memory ("none" for none), its reach, a seed."""

    task: str
    memory: str
    arm: str
    seed: int

    @property
    def path(self) -> str:
        """File of the result."""
        name = "no_memory" if self.memory == "none" else self.memory
        return f"{self.task}/{name}/{self.arm.replace(' ', '_')}_{self.seed}.json"

    @property
    def name(self) -> str:
        """Name for people."""
        arm = "" if self.arm == "far" else f", {self.arm}"
        return f"{self.task}: {self.arm if self.memory == 'none' else self.memory + arm}, seed {self.seed}"

    def say(self, line: str) -> None:
        """Print a line of progress, from any process."""
        print(f"{self.name}: {line}", flush=True)

    def sentence(self, result: Result) -> str:
        """Return the result in a line."""
        exact = f" ({100 * result['exact']:.1f} % of episodes)" if "exact" in result else ""
        right = f"{100 * result['accuracy']:.1f} % right{exact}"
        return f"{self.name}: {right} after {result['steps']} steps, {result['seconds']:.0f} s"


@dataclasses.dataclass(frozen=True)
class Trials:
    """A set of probes.

    Attributes:
        steps: the most of a training. options: of tasks and memories, by their names; those of a memory override its
            registration, and those of "model" are fields of `ProbeSizes`, the same for all.
        taps: of the short convolution before attention, the same for all; 1 for none.
        controls: "whole", attention over the whole text, of one seed; "window", for each memory that is none a window
            of at most as many bytes.
        file: name of the file with all results.
    """

    memories: Sequence[str]
    tasks: Sequence[str]
    distance: int
    seeds: int
    steps: int
    folder: Path
    options: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    taps: int = 1
    controls: Sequence[str] = dataclasses.field(default=(), kw_only=True)
    file: ClassVar[str] = "probe.json"

    def all(self) -> list[Trial]:
        """Return every training, seed by seed and task by task."""
        trials = []
        for seed, task in itertools.product(range(self.seeds), self.tasks):
            trials.append(Trial(task, "none", NONE, seed))
            trials += [Trial(task, "none", WHOLE, seed)] if "whole" in self.controls and not seed else []
            for memory in self.memories:
                trials.append(Trial(task, memory, "within reach", seed))
                if setting(memory).beyond is not None and self.taps == 1:  # taps reach beyond the bound
                    trials.append(Trial(task, memory, "out of reach", seed))
                trials += self.windows(task, memory, seed)
        return trials

    def windows(self, task: str, memory: str, seed: int) -> list[Trial]:
        """Return the window of a memory, if it is asked for, a slot has room, and the memory is no window itself."""
        trial = Trial(task, memory, WINDOW, seed)
        with contextlib.suppress(ValueError):  # the memory's own trial raises those of its options
            return [trial] if "window" in self.controls and self.settings(trial)["memory"] is not None else []
        return []

    def missing(self) -> list[Trial]:
        """Return the trainings without a result of their settings."""
        return [trial for trial in self.all() if self.stored(trial) is None]

    def stored(self, trial: Trial) -> Result | None:
        """Return the result in the trial's file if it has the same settings."""
        path = self.folder / trial.path
        result: Result | None = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
        return result if result is not None and result["settings"] == self.settings(trial) else None

    def settings(self, trial: Trial) -> dict[str, Any]:
        """Return everything that determines the result of a trial; stored with it.

        Raises:
            ValueError: the task or the memory's options do not fit the distance.
        """
        self.task(trial.task).segments(self.distance)
        options = None
        if trial.memory != "none":
            chosen = setting(trial.memory)
            options = chosen.beyond if trial.arm == "out of reach" else chosen.within
        return self._settings(trial, options, distance=self.distance)

    def _settings(self, trial: Trial, options: Options | None, **more: Any) -> dict[str, Any]:
        """Return settings as they are read back from a file; `options` are those of the memory, if there is one."""
        sizes = ProbeSizes(steps=self.steps, short_convolution=self.taps, **self._options(MODEL))
        spec, passes = None, 1
        if options is not None:
            chosen, segment = setting(trial.memory), self.task(trial.task).segment
            passes = chosen.passes
            spec = {"name": trial.memory, **options(segment, self.distance, sizes.depth), **self._options(trial.memory)}
            if trial.arm == WINDOW:
                task, plain = self.task(trial.task), sizes
                spec, passes = window_of(spec, lambda memory: build_model(task, memory, plain)), 1
            elif chosen.learning_rate is not None and "learning_rate" not in self._options(MODEL):
                sizes = dataclasses.replace(sizes, learning_rate=chosen.learning_rate)
        settings = {"task": self._options(trial.task), "memory": spec, "passes": passes, **more}
        read: dict[str, Any] = json.loads(json.dumps({**settings, "sizes": dataclasses.asdict(sizes)}))
        return read

    def _options(self, name: str) -> dict[str, Any]:
        return dict(self.options.get(name, {}))

    def task(self, name: str) -> ProbeTask:
        """Return a task with its options."""
        task: ProbeTask = PROBES.create(name, **self._options(name))
        return task

    def work(self, trial: Trial, settings: dict[str, Any]) -> Result:
        """Train one model, report its progress, and write its result."""
        torch.set_num_threads(1)
        task, distance = self.task(trial.task), self.distance
        outcome = probe(
            task,
            settings["memory"],
            distance,
            seed=trial.seed,
            sizes=ProbeSizes(**settings["sizes"]),
            passes=settings["passes"],
            whole=trial.arm == WHOLE,
            distances=[other for other in range(1, 2 * distance + 1) if task.has(other)],
            say=trial.say,
        )
        result = {"settings": settings, "chance": task.chance, **dataclasses.asdict(outcome)}
        path = self.folder / trial.path
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json_text(result))
        return result

    def train(self, trials: Sequence[Trial], jobs: int) -> Generator[tuple[Trial, Result], None, None]:
        """Train some of them, `jobs` at a time, and yield each with its result.

        The workers end when one of them fails, when this process ends, and when the iterator is closed.

        Raises:
            InUse: another process probes into the folder.
        """
        settings = {trial: self.settings(trial) for trial in trials}  # a wrong option raises before any training
        with folder_lock(self.folder):
            if jobs == 1 or len(trials) < 2:
                for trial in trials:
                    yield trial, self.work(trial, settings[trial])
                return
            yield from self._train_in_processes(settings, jobs)

    def _train_in_processes(
        self, settings: Mapping[Trial, dict[str, Any]], jobs: int
    ) -> Generator[tuple[Trial, Result], None, None]:
        context = multiprocessing.get_context("spawn")
        theirs, ours = context.Pipe(duplex=False)
        with ProcessPoolExecutor(jobs, context, stop_after, (partial(theirs.poll, None),)) as pool:
            try:
                running = {pool.submit(self.work, trial, plan): trial for trial, plan in settings.items()}
                for future in as_completed(running):
                    yield running[future], future.result()
            except BaseException:
                ours.close()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def content(self, command: str) -> Result:
        """Return all results and settings, as files and pages show them."""
        texts = {trial: (self.folder / trial.path).read_text(encoding="utf-8") for trial in self.all()}
        results = [{**trial._asdict(), **json.loads(text)} for trial, text in texts.items()]
        return {
            "command": command,
            "date": datetime.date.today().isoformat(),
            "environment": environment("cpu"),
            "memories": list(self.memories),
            "tasks": list(self.tasks),
            "seeds": self.seeds,
            "distance": self.distance,
            "controls": list(self.controls),
            "notes": {memory: setting(memory).why for memory in self.memories if setting(memory).why},
            "results": results,
        }

    def write(self, command: str) -> Result:
        """Write the file with all results, and return its content."""
        result = self.content(command)
        result["efficiency"] = probe_efficiencies(result)
        write_whole(self.folder / self.file, json_text(result))
        return result
