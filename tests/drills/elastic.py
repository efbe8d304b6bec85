"""Drill: one process of two is killed at each start, and torchrun's launcher restarts both (`--max-restarts`).

A case `fsdp/async/3` is `training.parallel`, `training.save`, and a seed of the moments. The same tiny run is trained
twice, without and with kills. Both must then be equal to the bit: weights, averaged weights, optimiser, states, random
states, metrics and test scores, times excepted. A kill may cost the steps since the last checkpoint
(`training.save=async`: since the one before, if the last was being written), and no process may remain.

    FOLDER/plan.json       the moments                      FOLDER/kills.jsonl    the processes that were killed
    FOLDER/run, /whole     the run folders                  FOLDER/starts.jsonl   the step at which each start began

Moments: `start`, before the processes meet; `resume`, at a file operation among checkpoints before the first step;
`step`, a time after a step began, during forward, backward, evaluation or the next step; `save`, at a file operation of
a save, in any thread, or a time after its start where the process writes nothing.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from training import small_language

from cached_lab.experiments import run as run_module
from cached_lab.tasks.recipes import config_from_dict
from cached_lab.training.config import RunConfig
from cached_lab.training.trainer import Trainer
from cached_transformers.files import lives, write_whole

from . import _runs
from .frame import Failure

SIZE = 2
KINDS = {"step": 10, "save": 7, "resume": 2, "start": 1}
"""Kinds of moments, and their weights in the draw."""
FILES = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")
"""Audit events that are file operations."""
LONGEST = 0.1
"""Longest delay of a kill in seconds after a step began; a fifth of it after a save began."""


@dataclass(frozen=True)
class Kill:
    """A moment at which a process is killed: the first of its kind in, or after, a step.

    Attributes:
        place: position among the file operations, or share of `LONGEST`; in [0, 1).
    """

    kind: str
    rank: int
    step: int
    place: float


def draw(kills: int, steps: int, save_every: int, seed: int) -> list[Kill]:
    """Draw kills in the order of their steps, so that each start reaches its own."""
    chance = random.Random(seed)
    at = sorted(chance.randint(1, steps - 2 * save_every) for _ in range(kills))
    kinds = chance.choices(list(KINDS), list(KINDS.values()), k=kills)
    return [Kill(kind, chance.randrange(SIZE), step, chance.random()) for kind, step in zip(kinds, at, strict=True)]


def recipe(text: Path, steps: int, save_every: int, settings: Mapping[str, Any]) -> RunConfig:
    """Return a small run with dropout, averaged weights and a memory state carried from step to step."""
    training = {"steps": steps, "save_every": save_every, "evaluate_every": 4 * save_every, "log_every": save_every}
    training |= {"bptt": 2, "ema_decay": 0.9, **settings}
    return config_from_dict(
        small_language.recipe(text, *(f"training.{key}={value}" for key, value in training.items()))
    )


class Doomed(Trainer):
    """Trainer that kills its process at the moment planned for it."""

    doom: Doom

    def fit(self) -> None:
        """Record the first step, and train."""
        self.doom.begins(self.step)
        super().fit()

    def _train_step(self, *arguments: Any) -> None:
        self.doom.steps(self.step + 1)
        super()._train_step(*arguments)

    def save(self, scheduled: bool | None = True) -> None:
        """Report the save to the plan, and save."""
        self.doom.saves(self.step)
        super().save(scheduled)


class Doom:
    """The plan of one process of a start: wait for the moment, record it, and die.

    Args:
        folder: folder of the drill. rank: rank of this process.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        plan = [Kill(**kill) for kill in json.loads((folder / "plan.json").read_text(encoding="utf-8"))["kills"]]
        self.folder, self.rank = folder, rank
        self.number = len(_lines(folder / "kills.jsonl"))
        kill = plan[self.number] if self.number < len(plan) else None
        self.kill = kill if kill is not None and kill.rank == rank else None
        self.step = self.left = 0
        self.armed = self.begun = False
        self.checkpoints = str(folder / "run" / "checkpoints")

    def starts(self) -> None:
        """Mark the start of the process."""
        if self._is("start"):
            self.die("before the processes met")
        if self._is("resume"):
            self._count("of what is read", 12)

    def begins(self, step: int) -> None:
        """Mark the step at which the run starts or resumes."""
        self.step, self.begun = step, True
        _append(self.folder / "starts.jsonl", number=self.number, rank=self.rank, step=step, process=os.getpid())
        if self._is("resume"):
            self.die("before the first step")

    def steps(self, step: int) -> None:
        """Mark the beginning of a step."""
        self.step = step
        if self._is("step") and step >= self._kill.step and not self.armed:
            self._after(self._kill.place * LONGEST, f"after step {step} began")

    def saves(self, step: int) -> None:
        """Mark the beginning of a save."""
        if not self._is("save") or step < self._kill.step:
            return
        if self.armed:
            self.die("before the next save")
        if self.rank and (self._kill.place < 0.5 or not run_is_cut(self.folder)):
            self._after(self._kill.place * LONGEST / 5, f"after the save of step {step} began")
        else:  # the first process writes more than a share
            self._count(f"of the save of step {step}", 1 if self.rank else 25)

    def die(self, moment: str) -> None:
        """Record the moment, and kill this process."""
        _append(
            self.folder / "kills.jsonl",
            **{"number": self.number, "rank": self.rank, "kind": self._kill.kind, "moment": moment},
            **{"step": self.step if self.begun else None, "process": os.getpid()},
        )
        os.kill(os.getpid(), signal.SIGKILL)

    @property
    def _kill(self) -> Kill:
        assert self.kill is not None
        return self.kill

    def _is(self, kind: str) -> bool:
        return self.kill is not None and self.kill.kind == kind

    def _after(self, seconds: float, what: str) -> None:
        self.armed = True
        timer = threading.Timer(seconds, lambda: self.die(f"{1000 * seconds:.0f} ms {what}"))
        timer.daemon = True
        timer.start()

    def _count(self, what: str, most: int) -> None:
        """Die at one of the next `most` file operations in the folder of checkpoints."""
        self.armed = True
        at = self.left = int(self._kill.place * most)

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            if event in FILES and isinstance(arguments[0], (str, os.PathLike)):
                name = os.fspath(arguments[0])
                if name.startswith(self.checkpoints) and not name.endswith(".jsonl"):
                    self.left -= 1
                    if self.left < 0:
                        self.die(f"file operation {at + 1} {what} ({event} {Path(name).name})")

        sys.addaudithook(count)


def run_is_cut(folder: Path) -> bool:
    """Return True if every process writes its share of a checkpoint."""
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    return bool(plan["settings"].get("parallel") == "fsdp")


def work(folder: Path, name: str) -> None:
    """Train in a process of torchrun, following the plan in the run that is killed."""
    torch.set_num_threads(1)
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    if name == "run":
        doom = Doomed.doom = Doom(folder, int(os.environ["RANK"]))
        run_module.Trainer = Doomed  # type: ignore[misc]
        doom.starts()
    config = recipe(folder / "text", plan["steps"], plan["save_every"], plan["settings"])
    run_module.run_training(config, folder / name)


def trained(folder: Path, name: str, restarts: int) -> None:
    """Train one of the two runs in two processes, forked and restarted by torchrun's launcher."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    sizes = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": SIZE, "max_restarts": restarts}
    meeting = {"run_id": name, "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "local_addr": "localhost"}
    config = LaunchConfig(**sizes, **meeting, monitor_interval=0.05, start_method="fork")
    elastic_launch(config, work)(folder, name)


def drill(folder: Path, kills: int, steps: int, save_every: int, seed: int = 0, **settings: Any) -> None:
    """Train both runs, and compare them.

    Args:
        kills, steps, save_every, seed: see `draw`. settings: of the section `training`.

    Raises:
        Failure: differences between the runs, kills that cost too much, processes that remain.
    """
    small_language.write_text(folder / "text")
    plan = {"steps": steps, "save_every": save_every, "settings": settings}
    plan["kills"] = [asdict(kill) for kill in draw(kills, steps, save_every, seed)]
    write_whole(folder / "plan.json", json.dumps(plan, indent=1).encode())
    for name, restarts in (("whole", 0), ("run", kills)):
        trained(folder, name, restarts)
    died, started = _lines(folder / "kills.jsonl"), _lines(folder / "starts.jsonl")
    _runs.compare_runs(folder / "run", folder / "whole")
    problems = [] if len(died) == kills else [f"{len(died)} of {kills} kills happened"]
    problems += [f"process {p} remains" for line in (*died, *started) if lives(p := line["process"])]
    most = save_every * (2 if settings.get("save") == "async" else 1)
    for line in died:
        resumed = next((s["step"] for s in started if s["number"] > line["number"]), -1)
        lost = 0 if line["step"] is None else line["step"] - resumed
        if resumed < 0 or lost > most:
            problems.append(f"kill {line['number'] + 1} {line['moment']} cost {lost} steps, more than {most}")
    if problems:
        raise Failure("\n".join(problems))


def _append(path: Path, **line: Any) -> None:
    """Append a line in one write, so that lines of several processes do not mix."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(handle, f"{json.dumps(line)}\n".encode())
    finally:
        os.close(handle)


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def cases(count: int, seed: int) -> Iterator[str]:
    ways = [(parallel, save) for save in ("async", "sync") for parallel in ("ddp", "fsdp")]
    return ("/".join([*ways[number % len(ways)], str(seed + number // len(ways))]) for number in range(count))


def attempt(case: str, folder: Path) -> None:
    parallel, save, seed = case.split("/")
    drill(folder, 2, 12, 3, int(seed), parallel=parallel, save=save)


SUMMARY = (
    "of two processes that train together one is killed at each of two starts, between and inside steps, saves "
    "and resumptions, and both are restarted: the run equals the undisturbed run, and loses no more than a save"
)
COUNT, SAMPLE, LIMIT = 20, 1, 300.0
prepare = _runs.import_all
