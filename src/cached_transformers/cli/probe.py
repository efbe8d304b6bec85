"""`cached probe`: what memories hold, on tasks that nothing but a memory can solve."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import multiprocessing
import shlex
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from cached_transformers.registry import MEMORIES, PROBES, unknown_name

FAST = ("latch", "copy", "recall")
NEEDS_FILES = "facts"


class Trial(NamedTuple):
    """One training: a task, a memory (None for none), how far it reaches, a seed."""

    task: str
    memory: str
    arm: str
    seed: int

    @property
    def path(self) -> str:
        """Where its result is kept."""
        owner = "no_memory" if self.arm == "no memory" else self.memory
        return f"{self.task}/{owner}/{self.arm.replace(' ', '_')}_{self.seed}.json"


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "probe",
        help="what a memory holds: tasks that nothing but a memory can solve",
        description="Trains a small language model on each task with each memory, with options that put what is asked "
        "within its reach, with options that put it beyond (where its theory knows a bound), and without the memory. "
        "Prints the share of right answers and draws it against the distance. Finished trainings are kept: the same "
        "command goes on where it was stopped.",
        epilog="example: cached probe rmt,transformer_xl --tasks latch,copy --jobs 2",
    )
    parser.add_argument("memories", help="names of memories, separated by commas, or 'all'")
    parser.add_argument("--tasks", default=",".join(FAST), help=f"tasks, by commas (default: {','.join(FAST)})")
    parser.add_argument("--distance", type=int, default=3, help="segments between cue and question (default: 3)")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each kind (default: 1)")
    parser.add_argument("--steps", type=int, default=2000, help="steps at most; ends early when solved (default: 2000)")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time (default: 1)")
    parser.add_argument("--babi", type=Path, help="bAbI's archive or folder, for the task 'facts'")
    parser.add_argument("--books", type=Path, help="folder of books, for the task 'facts'")
    parser.add_argument("--out", type=Path, default=Path("runs/probe"), help="folder (default: runs/probe)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train what is missing, print the table, write probe.json and the report; returns 0.

    Raises:
        ValueError: unknown names, or numbers that do not fit.
    """
    for name in ("distance", "seeds", "steps", "jobs"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name} {getattr(arguments, name)} must be at least 1")
    memories, tasks = _memories(arguments.memories), _tasks(arguments)
    console = Console(highlight=False)
    trials = _trials(memories, tasks, arguments.seeds)
    missing = [t for t in trials if not _finished(arguments.out / t.path, _settings(t, arguments))]
    if len(missing) < len(trials):
        console.print(f"{len(trials) - len(missing)} finished trainings kept, {len(missing)} to do")
    if arguments.jobs == 1 or len(missing) < 2:
        for trial in missing:
            _told(console, trial, _train(trial, _settings(trial, arguments), arguments.out))
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(arguments.jobs, mp_context=context) as pool:
            work = [(trial, _settings(trial, arguments), arguments.out) for trial in missing]
            for trial, result in zip(missing, pool.map(_train, *zip(*work, strict=True)), strict=True):
                _told(console, trial, result)
    result = _collect(trials, memories, tasks, arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "probe.json"
    _write(path, result)
    _print(result, console)
    try:
        from cached_transformers.experiments.reports.probe_report import write_probe_report

        path = write_probe_report(arguments.out)
    except ImportError as error:
        console.print(f"no report: {error}", markup=False)
    console.print(f"written: {path}", markup=False, soft_wrap=True)
    return 0


def _memories(text: str) -> list[str]:
    from cached_transformers.experiments.probes.settings import stream_memories

    known = stream_memories()
    if text == "all":
        return known
    names = text.split(",")
    for name in names:
        MEMORIES.entry(name)
        if name not in known:
            raise ValueError(
                f"memory {name!r} keeps nothing for each row of a stream, so there is nothing to probe; "
                f"take one of {', '.join(known)}"
            )
    return names


def _tasks(arguments: argparse.Namespace) -> list[str]:
    from cached_transformers.experiments import probes  # noqa: F401  (fills the registry)

    names: list[str] = arguments.tasks.split(",") if arguments.tasks != "all" else PROBES.names()
    files = arguments.babi is not None and arguments.books is not None
    if arguments.tasks == "all" and not files:
        names = [name for name in names if name != NEEDS_FILES]
    for name in names:
        if name not in PROBES:
            raise ValueError(unknown_name("probe task", name, PROBES.names()))
    if NEEDS_FILES in names and not files:
        raise ValueError("the task 'facts' reads files: give --babi ARCHIVE_OR_FOLDER and --books FOLDER")
    return names


def _trials(memories: list[str], tasks: list[str], seeds: int) -> list[Trial]:
    from cached_transformers.experiments.probes.settings import setting

    trials = []
    for seed, task in itertools.product(range(seeds), tasks):
        trials.append(Trial(task, "none", "no memory", seed))
        for memory in memories:
            trials.append(Trial(task, memory, "within reach", seed))
            if setting(memory).beyond is not None:
                trials.append(Trial(task, memory, "out of reach", seed))
    return trials


def _settings(trial: Trial, arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that determines the result of a trial; kept beside it, so that a change makes it be trained anew."""
    from cached_transformers.experiments.probes.protocol import Sizes
    from cached_transformers.experiments.probes.settings import setting

    files = {name: str(getattr(arguments, name)) for name in ("babi", "books")} if trial.task == NEEDS_FILES else {}
    task, sizes = PROBES.create(trial.task, **files), Sizes(steps=arguments.steps)
    spec, passes = None, 1
    if trial.arm != "no memory":
        chosen = setting(trial.memory)
        options = chosen.within if trial.arm == "within reach" else chosen.beyond
        assert options is not None
        spec, passes = {"name": trial.memory, **options(task, arguments.distance, sizes)}, chosen.passes
        if chosen.learning_rate is not None:
            sizes = dataclasses.replace(sizes, learning_rate=chosen.learning_rate)
    settings = {"files": files, "distance": arguments.distance, "memory": spec, "passes": passes}
    whole = {**settings, "sizes": dataclasses.asdict(sizes)}
    return json.loads(json.dumps(whole))  # as it will be read back


def _train(trial: Trial, settings: dict[str, Any], out: Path) -> dict[str, Any]:
    """Train one, and keep its result."""
    import torch

    from cached_transformers.experiments.probes.protocol import Sizes, as_dict, probe

    torch.set_num_threads(1)
    task, distance = PROBES.create(trial.task, **settings["files"]), settings["distance"]
    farther = range(max(task.shortest, 1), _farthest(trial.task, distance) + 1)
    outcome = probe(
        task,
        settings["memory"],
        distance,
        seed=trial.seed,
        sizes=Sizes(**settings["sizes"]),
        passes=settings["passes"],
        distances=farther,
    )
    result = {"settings": settings, "chance": task.chance, "memory": settings["memory"], **as_dict(outcome)}
    path = out / trial.path
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, result)
    return result


def _farthest(task: str, distance: int) -> int:
    return min(2 * distance, 6) if task == "recall" else 2 * distance


def _finished(path: Path, settings: dict[str, Any]) -> bool:
    return path.is_file() and json.loads(path.read_text(encoding="utf-8"))["settings"] == settings


def _collect(trials: list[Trial], memories: list[str], tasks: list[str], arguments: argparse.Namespace) -> Any:
    from cached_transformers.experiments.environment import environment
    from cached_transformers.experiments.probes.settings import setting

    results = []
    for trial in trials:
        stored = json.loads((arguments.out / trial.path).read_text(encoding="utf-8"))
        results.append({**trial._asdict(), **stored, "options": stored["memory"], "memory": trial.memory})
    notes = {memory: setting(memory).why for memory in memories if setting(memory).why}
    for name in tasks:
        task = PROBES.create(name) if name != NEEDS_FILES else None
        if task is not None and task.without_first(arguments.distance) > task.chance:
            share = 100 * task.without_first(arguments.distance)
            notes[name] = f"a memory that falls short of the first segment alone is right in {share:.1f} %"
    return {
        "command": shlex.join(["cached", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "environment": environment("cpu"),
        "distance": arguments.distance,
        "memories": memories,
        "tasks": tasks,
        "notes": notes,
        "results": results,
    }


def _write(path: Path, value: Any) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(value, indent=1), encoding="utf-8")
    temporary.replace(path)


def _told(console: Console, trial: Trial, result: dict[str, Any]) -> None:
    name = trial.memory if trial.arm != "no memory" else "no memory"
    arm = "" if trial.arm == "no memory" else f", {trial.arm}"
    console.print(
        f"{trial.task}: {name}{arm}, seed {trial.seed}: {100 * result['accuracy']:.1f} % right after "
        f"{result['steps']} steps, {result['seconds']:.0f} s",
        markup=False,
        soft_wrap=True,
    )


def _print(result: dict[str, Any], console: Console) -> None:
    from cached_transformers.experiments.reports.probe_report import accuracy_text, table_columns, table_rows

    title = f"right answers in per cent, {result['distance']} segments after the cue"
    table = Table(title=title, title_justify="left", box=None, header_style="bold")
    table.add_column("memory", no_wrap=True)
    for column in table_columns(result):
        table.add_column(column.replace(", ", "\n"), justify="right")
    for row in table_rows(result):
        table.add_row(row.name, *map(accuracy_text, row.trainings))
    console.print(table)
    for name, note in result["notes"].items():
        console.print(f"{name}: {note}", markup=False)
