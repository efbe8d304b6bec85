"""Drill of restarts: kill processes that train together again and again, and let torchrun restart them.

    python -m drills.elastic --parallel fsdp --kills 20

The same tiny run is trained twice under torchrun (`--max-restarts`): once without kills, and once with a SIGKILL to one
process of each start, at a moment drawn by a seed. Both runs must then be equal to the bit: weights, averaged weights,
optimiser, states, random states, metrics and test scores, times excepted. A kill may cost the steps since the last
checkpoint (`training.save=async`: since the one before, if the last was being written), and no process may remain.

    FOLDER/plan.json       the moments                      FOLDER/kills.jsonl    the processes that were killed
    FOLDER/run, /whole     the run folders                  FOLDER/starts.jsonl   the step at which each start began
    FOLDER/*.log           the output of torchrun

Moments: `start`, before the processes meet; `resume`, at a file operation among checkpoints before the first step;
`step`, a time after a step began, during forward, backward, evaluation or the next step; `save`, at a file operation of
a save, in any thread, or a time after its start where the process writes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from cached_lab.experiments import run as run_module
from cached_lab.tasks.recipes import config_from_dict
from cached_lab.training.config import RunConfig
from cached_lab.training.trainer import Trainer
from cached_transformers.files import lives, write_whole

from .frame import Failure

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


def draw(kills: int, steps: int, save_every: int, size: int, seed: int) -> list[Kill]:
    """Draw kills in the order of their steps, so that each start reaches its own."""
    chance = random.Random(seed)
    at = sorted(chance.randint(1, steps - 2 * save_every) for _ in range(kills))
    kinds = chance.choices(list(KINDS), list(KINDS.values()), k=kills)
    return [Kill(kind, chance.randrange(size), step, chance.random()) for kind, step in zip(kinds, at, strict=True)]


def recipe(text: Path, steps: int, save_every: int, settings: Mapping[str, Any]) -> RunConfig:
    """Return a small run with dropout, averaged weights and a memory state carried from step to step."""
    training: dict[str, Any] = {
        "steps": steps,
        "save_every": save_every,
        "evaluate_every": 4 * save_every,
        "log_every": save_every,
    }
    training |= {"batch_size": 4, "segment_length": 8, "segments": 2, "bptt": 2, "ema_decay": 0.9}
    return config_from_dict(
        {
            "name": "drill",
            "data": {"name": "text", "path": str(text), "tokenizer": "byte"},
            "model": {
                **{"name": "language_model", "width": 16, "depth": 2, "heads": 2, "feed_forward": 16, "dropout": 0.1},
                "memory": {"name": "transformer_xl", "length": 6},
            },
            "training": {**training, "metric": "bits_per_byte", "tensorboard": False, "device": "cpu", **settings},
            "optimizer": {"learning_rate": 0.01},
            "schedule": {"name": "constant"},
        }
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

    def save(self) -> None:
        """Report the save to the plan, and save."""
        self.doom.saves(self.step)
        super().save()


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


def trained_forked(folder: Path, name: str, size: int, restarts: int) -> None:
    """Train like `trained`, with processes forked from this one, which need no imports."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=size,
        run_id=name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        monitor_interval=0.05,
        start_method="fork",
        local_addr="localhost",
    )
    elastic_launch(config, work)(folder, name)


def trained(folder: Path, name: str, size: int, nodes: int, restarts: int) -> None:
    """Train one of the two runs under torchrun.

    Args:
        nodes: number of torchruns on this machine, with `size` / `nodes` processes each.

    Raises:
        RuntimeError: it failed; the message has the end of its output.
    """
    meeting = ["--standalone"]
    if nodes > 1:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", name]
        meeting += ["--nnodes", str(nodes), "--local-addr", "localhost"]
    command = [sys.executable, "-m", "torch.distributed.run", *meeting, "--nproc-per-node", str(size // nodes)]
    command += ["--max-restarts", str(restarts), "--monitor-interval", "0.05"]
    command += ["-m", "drills.elastic", "--work", str(folder), name]
    tests = Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(tests.parent / "src"), str(tests), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    logs = [folder / f"{name}_{node}.log" for node in range(nodes)]
    processes = []
    for log in logs:
        with log.open("wb") as file:
            processes.append(subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT))
    if any([process.wait() for process in processes]):
        said = logs[0].read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"the run {name} failed under torchrun; {logs[0]} ends with\n{said[-3000:]}")


@dataclass(frozen=True)
class ElasticOutcome:
    """Result of a drill.

    Attributes:
        rows: per kill its number, rank, moment, step, first step of the next start, and steps lost.
        problems: differences between the runs, kills that cost too much, processes that remain.
        seconds: times of the run without and with kills.
    """

    rows: list[tuple[int, int, str, int | None, int, int]]
    problems: list[str]
    seconds: tuple[float, float]

    def table(self) -> str:
        """Return the kills as a table in Markdown."""
        head = "| kill | process | moment | in step | resumed from | steps lost |\n|---|---|---|---|---|---|\n"
        return head + "".join(
            f"| {number} | {rank} | {moment} | {'-' if step is None else step} | {resumed} | {lost} |\n"
            for number, rank, moment, step, resumed, lost in self.rows
        )


def drill(
    folder: Path,
    kills: int,
    steps: int,
    save_every: int,
    seed: int = 0,
    size: int = 2,
    nodes: int = 1,
    forked: bool = False,
    **settings: Any,
) -> ElasticOutcome:
    """Train both runs, and compare them.

    Args:
        folder: a new folder. kills, steps, save_every, seed: see `draw`. size: processes. nodes: see `trained`.
        forked: see `trained_forked`; for one node. settings: of the section `training`.

    Raises:
        ValueError: too few steps for checkpoints before and after the kills.
        RuntimeError: torchrun gave up.
    """
    if steps < 3 * save_every:
        raise ValueError(f"steps={steps} must be at least 3 * save_every={3 * save_every}, so that there is room")
    (folder / "text").mkdir(parents=True)
    chance = random.Random(0)
    for name, lines in {"train": 117, "valid": 15, "test": 15}.items():
        words = ("".join(chance.choices("abcdefgh", k=chance.randint(1, 5))) for _ in range(6 * lines))
        (folder / "text" / f"{name}.txt").write_text(" ".join(words), encoding="utf-8")
    plan = {"steps": steps, "save_every": save_every, "settings": settings}
    plan["kills"] = [asdict(kill) for kill in draw(kills, steps, save_every, size, seed)]
    write_whole(folder / "plan.json", json.dumps(plan, indent=1).encode())
    times = [time.perf_counter()]
    for name, restarts in (("whole", 0), ("run", kills)):
        if forked:
            trained_forked(folder, name, size, restarts)
        else:
            trained(folder, name, size, nodes, restarts)
        times.append(time.perf_counter())
    seconds = times[1] - times[0], times[2] - times[1]
    died, started = _lines(folder / "kills.jsonl"), _lines(folder / "starts.jsonl")
    from ._runs import compare_runs  # with imports that the forked processes do not need

    problems: list[str] = []
    try:
        compare_runs(folder / "run", folder / "whole")
    except Failure as failure:
        problems.append(str(failure))
    if len(died) != kills:
        problems.append(f"{len(died)} of {kills} kills happened")
    problems += [f"process {p} remains" for line in (*died, *started) if lives(p := line["process"])]
    rows, most = [], save_every * (2 if settings.get("save") == "async" else 1)
    for line in died:
        resumed = next((s["step"] for s in started if s["number"] > line["number"]), -1)
        lost = 0 if line["step"] is None else line["step"] - resumed
        rows.append((line["number"] + 1, line["rank"], line["moment"], line["step"], resumed, lost))
        if resumed < 0 or lost > most:
            problems.append(f"kill {line['number'] + 1} cost {lost} steps, more than {most}")
    return ElasticOutcome(rows, problems, seconds)


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


def main(argv: list[str] | None = None) -> int:
    """Run the drill from the command line; return exit status 0 if nothing failed."""
    parser = argparse.ArgumentParser(prog="python -m drills.elastic")
    parser.add_argument("--parallel", default="fsdp", choices=("fsdp", "ddp"), help="training.parallel")
    parser.add_argument("--save", default="sync", choices=("sync", "async"), help="training.save")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=1, help="torchruns that meet on this machine")
    parser.add_argument("--forked", action="store_true", help="fork the processes: no torchrun command, and no imports")
    parser.add_argument("--out", type=Path, default=Path("runs/elastic_drill"), help="a folder that does not exist")
    parser.add_argument("--work", nargs=2, metavar=("FOLDER", "RUN"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.work is not None:
        work(Path(arguments.work[0]), arguments.work[1])
        return 0
    if arguments.out.exists():
        parser.error(f"--out {arguments.out} is there already; choose another folder")
    outcome = drill(
        arguments.out,
        arguments.kills,
        arguments.steps,
        arguments.save_every,
        arguments.seed,
        arguments.processes,
        arguments.nodes,
        arguments.forked,
        parallel=arguments.parallel,
        save=arguments.save,
    )
    print(outcome.table())
    print(f"{outcome.seconds[0]:.0f} s without kills, {outcome.seconds[1]:.0f} s with {len(outcome.rows)}")
    for problem in outcome.problems:
        print(f"does not hold: {problem}")
    if not outcome.problems:
        print("the killed run equals the run without kills, to the bit")
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
