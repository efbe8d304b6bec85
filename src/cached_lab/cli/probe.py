"""`cached probe`: what memories hold, on tasks that nothing but a memory can solve."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from cached_lab.experiments.probes.far_trials import FarTrials
    from cached_lab.experiments.probes.trials import Trials

from .arguments import command_line, refuse_below_one, refuse_too_many_seeds

FAST = ("latch", "copy", "recall")
BY_DISTANCE = (
    "far", "rows", "compile", "no_ceiling", "no_curriculum", "solved", "bptt", "bptt_window", "recall",
)  # fmt: skip
"""Arguments that only trainings by distance take."""


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "probe",
        help="what a memory holds: tasks that nothing but a memory can solve",
        description="Trains a small language model on each task with each memory, with options that put what is asked "
        "within its reach, with options that put it beyond (where its theory knows a bound), and without the memory. "
        "Prints the share of right answers and draws it against the distance. With --train-distance each memory is "
        "trained at many distances instead, and asked in texts of up to --far tokens, which are read as streams. "
        "Says how trainings go while they do. Finished ones are kept: the same command goes on where it was stopped.",
        epilog="examples: cached probe rmt,transformer_xl --tasks latch,mqar mqar.pairs=8 --jobs 2; "
        "cached probe rmt,grc_stream rmt.length=2 --tasks latch --train-distance 1..20 --far 1000000",
    )
    parser.add_argument("memories", help="names of memories, separated by commas, or 'all'")
    add_options(parser)
    parser.add_argument(
        "--tasks",
        default=",".join(FAST),
        help=f"tasks from `cached list probes`, by commas, or 'all' (default: {','.join(FAST)})",
    )
    parser.add_argument("--distance", type=int, help="segments between cue and question (default: 3)")
    parser.add_argument(
        "--train-distance",
        metavar="A..B",
        help="train with cue and question at random distances of A to B segments, and ask at any up to --far tokens; "
        "0 is one segment for both, which many tasks have, and ..B begins at the nearest that each task has; "
        "1,2,3,5,10 names the farthest of each stage of the curriculum",
    )
    parser.add_argument(
        "--no-curriculum",
        action="store_true",
        help="with --train-distance: all distances from the first step on, not farther ones as nearer ones are solved",
    )
    parser.add_argument(
        "--solved",
        type=float,
        metavar="S",
        help="with --train-distance: share of right answers at which the curriculum goes on (default: 0.99)",
    )
    parser.add_argument(
        "--bptt",
        type=int,
        metavar="K",
        help="with --train-distance: segments that a gradient crosses (default: all of an episode)",
    )
    parser.add_argument(
        "--bptt-window",
        choices=("blocks", "sliding"),
        help="with --bptt: cut the gradient after every K segments, or let each segment's loss reach back through K "
        "(default: blocks)",
    )
    parser.add_argument(
        "--recall",
        type=float,
        metavar="W",
        help="with --train-distance: weight of an auxiliary loss, by which the model says each segment again from the "
        "memory that holds it (default: none)",
    )
    parser.add_argument("--far", type=int, help="tokens of the longest text that is asked about (default: 1,000,000)")
    parser.add_argument("--rows", type=int, help="with --train-distance: texts of each length (default: 64)")
    parser.add_argument(
        "--no-ceiling",
        action="store_true",
        help="with --train-distance: do not train attention over the whole text, whose work grows with its square",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="with --train-distance: read texts of 10,000 segments and more with a compiled model, in half the time",
    )
    parser.add_argument(
        "--short-convolution",
        type=int,
        metavar="K",
        help="tokens that are mixed channel by channel in front of attention, in all models alike; 1 for none "
        "(default: 3 with --train-distance, else 1: it lengthens the bounds that 'out of reach' is about)",
    )
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each kind (default: 1)")
    parser.add_argument("--steps", type=int, default=2000, help="steps at most; ends early when solved (default: 2000)")
    parser.add_argument("--out", type=Path, default=Path("runs/probe"), help="folder (default: runs/probe)")
    parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare what all commands that probe have in common."""
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="NAME.option=value",
        help="options of tasks and memories, which `cached explain NAME` lists; model.width, depth, heads, "
        "feed_forward, batch_size, learning_rate, check_every and rows are those of the models and their training",
    )
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time (default: 1)")
    parser.add_argument("--babi", type=Path, help="bAbI's archive or folder, for the tasks 'facts' and 'babilong'")
    parser.add_argument("--books", type=Path, help="folder of books, for the same tasks")


def run(arguments: argparse.Namespace) -> int:
    """Train what is missing, print the table, and write probe.json and the report."""
    from cached_lab.experiments.probes.far_trials import FarTrials
    from cached_lab.experiments.reports.far_page import print_far, write_far_report
    from cached_lab.experiments.reports.probe_page import print_probe, write_probe_report
    from cached_lab.experiments.reports.terminal import open_console

    refuse_below_one(arguments, "distance", "seeds", "steps", "jobs", "far", "rows", "short_convolution", "bptt")
    refuse_too_many_seeds(arguments.seeds)
    memories, tasks, options = chosen(arguments, arguments.tasks)
    trials = _trials(arguments, tasks, memories, options)
    console = open_console()
    train_missing(trials, arguments.jobs, console)
    by_distance = isinstance(trials, FarTrials)
    (print_far if by_distance else print_probe)(trials.write(command_line()), console)
    try:
        path = (write_far_report if by_distance else write_probe_report)(arguments.out)
    except ImportError as error:
        path = arguments.out / ("far.json" if by_distance else "probe.json")
        console.print(f"no report: {error}", markup=False)
    console.print(f"written: {path}", markup=False, soft_wrap=True)
    return 0


def chosen(arguments: argparse.Namespace, tasks: str) -> tuple[list[str], list[str], dict[str, dict[str, Any]]]:
    """Names of memories and of tasks, and the options that were given of them and of the models (ValueError where
    there are none)."""
    from cached_lab.experiments.probes.choice import (
        FILES,
        MODEL,
        chosen_memories,
        chosen_tasks,
        options_of_memories,
        options_of_models,
    )

    files = {name: str(path) for name in FILES if (path := getattr(arguments, name)) is not None}
    memories = chosen_memories(arguments.memories)
    of: dict[str, list[str]] = {"memories": [], MODEL: [], "tasks": []}
    for override in arguments.overrides:
        name = override.partition("=")[0].partition(".")[0]
        of[MODEL if name == MODEL else "memories" if name in memories else "tasks"].append(override)
    by_task = chosen_tasks(tasks, files, of["tasks"])
    options = by_task | options_of_memories(memories, of["memories"]) | options_of_models(of[MODEL])
    return memories, list(by_task), options


def train_missing(trials: Trials, jobs: int, console: Console) -> None:
    """Train and ask what is not there yet, and say how it goes."""
    from cached_lab.experiments.reports.probe_progress import ProbeProgress

    missing = trials.missing()
    if len(missing) < len(trials.all()):
        console.print(f"{len(trials.all()) - len(missing)} finished trainings kept, {len(missing)} to do")
    with (
        ProbeProgress(console) as progress,
        contextlib.closing(trials.train(missing, jobs, progress.hear)) as results,
    ):
        for trial, result in results:
            progress.finished(trial, result)


def _trials(
    arguments: argparse.Namespace, tasks: list[str], memories: list[str], options: dict[str, dict[str, Any]]
) -> Trials | FarTrials:
    """What is to be trained (ValueError where options do not go together)."""
    from cached_lab.experiments.probes.distances import Course
    from cached_lab.experiments.probes.far_trials import FarTrials
    from cached_lab.experiments.probes.trials import Trials

    taps = arguments.short_convolution
    kept = (arguments.seeds, arguments.steps, arguments.out, options)
    if arguments.train_distance is None:
        for name in BY_DISTANCE:
            if (value := getattr(arguments, name)) is not None and value is not False:
                raise ValueError(f"--{name.replace('_', '-')} is for trainings by distance; give --train-distance A..B")
        return Trials(memories, tasks, arguments.distance or 3, *kept, taps or 1)
    if arguments.distance is not None:
        raise ValueError("--distance is for trainings at one distance, and --train-distance for many; give one of them")
    nearest, farthest, through = _distances(arguments.train_distance)
    if arguments.bptt_window is not None and arguments.bptt is None:
        raise ValueError(f"--bptt-window {arguments.bptt_window} is about the segments of --bptt K, which is not given")
    given = {name: getattr(arguments, name) for name in ("solved", "bptt", "bptt_window", "recall")}
    course = Course(
        1 if nearest is None else nearest,
        farthest,
        curriculum=not arguments.no_curriculum,
        through=through,
        **{name: value for name, value in given.items() if value is not None},
    )
    how = {"rows": arguments.rows or 64, "compiled": arguments.compile, "ceiling": not arguments.no_ceiling}
    how["begin_near"] = nearest is None
    return FarTrials(memories, tasks, farthest, *kept, taps or 3, course, arguments.far or 1_000_000, **how)


def _distances(text: str) -> tuple[int | None, int, tuple[int, ...]]:
    """The nearest and the farthest of "A..B", "..B" (None: the nearest that a task has), of a single number, or of a
    list of stages, which is the third."""
    stages = text.split(",")
    if len(stages) > 1 and all(stage.isdecimal() for stage in stages):
        through = tuple(map(int, stages))
        return through[0], through[-1], through
    nearest, dots, farthest = text.partition("..")
    if not dots:
        nearest, farthest = text, text
    if not farthest.isdecimal() or (nearest and not nearest.isdecimal()):
        raise ValueError(
            f"--train-distance {text!r} must be A..B or ..B, segments from cue to question, e.g. 1..7, "
            "or stages, e.g. 1,2,3,5"
        )
    return int(nearest) if nearest else None, int(farthest), ()
