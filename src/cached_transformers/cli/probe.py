"""`cached probe`: what memories hold, on tasks that nothing but a memory can solve."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

from .arguments import command_line, refuse_below_one, refuse_too_many_seeds

FAST = ("latch", "copy", "recall")


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
    """Train what is missing, print the table, and write probe.json and the report."""
    from cached_transformers.experiments.probes.trials import Trials, chosen_memories, chosen_tasks
    from cached_transformers.experiments.reports.probe_page import write_probe_report
    from cached_transformers.experiments.reports.terminal import open_console, print_probe

    refuse_below_one(arguments, "distance", "seeds", "steps", "jobs")
    refuse_too_many_seeds(arguments.seeds)
    given = {name: str(path) for name in ("babi", "books") if (path := getattr(arguments, name)) is not None}
    memories, tasks = chosen_memories(arguments.memories), chosen_tasks(arguments.tasks, files=len(given) == 2)
    sizes = (arguments.distance, arguments.seeds, arguments.steps)
    trials = Trials(memories, tasks, *sizes, arguments.out, given)
    console, missing = open_console(), trials.missing()
    if len(missing) < len(trials.all()):
        console.print(f"{len(trials.all()) - len(missing)} finished trainings kept, {len(missing)} to do")
    with contextlib.closing(trials.train(missing, arguments.jobs)) as results:
        for trial, result in results:
            console.print(trial.sentence(result), markup=False, soft_wrap=True)
    print_probe(trials.write(command_line()), console)
    try:
        path = write_probe_report(arguments.out)
    except ImportError as error:
        path = arguments.out / "probe.json"
        console.print(f"no report: {error}", markup=False)
    console.print(f"written: {path}", markup=False, soft_wrap=True)
    return 0
