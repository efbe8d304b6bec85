"""`cached probe`: test what memories hold, on tasks that only a memory can solve."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from cached_lab.experiments.probes.far_trials import FarTrials
    from cached_lab.experiments.probes.trials import Trials

from .arguments import add_command, command_line, refuse_below_one, refuse_too_many_seeds

FAST = ("latch", "copy", "recall")
BY_DISTANCE = ("far", "rows", "compile", "no_ceiling", "solved", "recall")
"""Arguments that need --train-distance."""


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = add_command(
        subparsers,
        "probe",
        run,
        "test what a memory holds, on tasks that only a memory can solve",
        description="Trains a small language model on each task with each memory, with options that put the answer "
        "within its reach, with options that put it beyond (if its theory knows a bound), and without the memory. "
        "Prints the share of right answers and draws it against the distance. With --train-distance each memory is "
        "trained at many distances instead, and tested in texts of up to --far tokens, read as streams. Finished "
        "trainings are kept: the same command continues after a stop.",
        epilog="examples: cached probe rmt,transformer_xl --tasks latch,mqar mqar.pairs=8 --jobs 2; "
        "cached probe rmt,grc_stream rmt.length=2 --tasks latch --train-distance 1..20 --far 1000000",
    )
    parser.add_argument("memories", help="names of memories, separated by commas, or 'all'")
    add_options(parser)
    tasks = f"tasks from `cached list probes`, by commas, or 'all' (default: {','.join(FAST)})"
    parser.add_argument("--tasks", default=",".join(FAST), help=tasks)
    parser.add_argument("--distance", type=int, help="segments between cue and question (default: 3)")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each kind (default: 1)")
    parser.add_argument("--steps", type=int, default=2000, help="steps at most; ends early when solved (default: 2000)")
    parser.add_argument("--out", type=Path, default=Path("runs/probe"), help="folder (default: runs/probe)")
    taps = "tokens mixed channel by channel before attention, in all models; 1 for none (default: 3 with "
    taps += "--train-distance, else 1: it lengthens the bounds of 'out of reach')"
    parser.add_argument("--short-convolution", type=int, metavar="K", help=taps)
    parser.add_argument(
        "--train-distance",
        metavar="A..B",
        help="train with cue and question at random distances of A to B segments, and test at any up to --far tokens; "
        "0 puts both into one segment, which many tasks allow, and ..B begins at each task's nearest; 1,2,3,5,10 names "
        "the farthest of each stage of the curriculum",
    )
    distances = parser.add_argument_group("with --train-distance")
    solved = "share of right answers that ends a stage of the curriculum (default: 0.99)"
    distances.add_argument("--solved", type=float, metavar="S", help=solved)
    recall = "weight of an auxiliary loss: reconstruct each segment from the memory (default: none)"
    distances.add_argument("--recall", type=float, metavar="W", help=recall)
    distances.add_argument("--far", type=int, help="tokens of the longest tested text (default: 1,000,000)")
    distances.add_argument("--rows", type=int, help="texts of each length (default: 64)")
    ceiling = "do not train attention over the whole text, whose cost is quadratic"
    distances.add_argument("--no-ceiling", action="store_true", help=ceiling)
    compiled = "read texts of 10,000 segments and more with a compiled model, in half the time"
    distances.add_argument("--compile", action="store_true", help=compiled)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of both commands that probe."""
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="NAME.option=value",
        help="options of tasks and memories (see `cached explain NAME`), and of the models and their training: "
        "model.width, depth, heads, feed_forward, batch_size, learning_rate, check_every, rows",
    )
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time (default: 1)")
    parser.add_argument("--babi", type=Path, help="bAbI's archive or folder, for the task 'babilong'")
    parser.add_argument("--books", type=Path, help="folder of books, for the same task")


def run(arguments: argparse.Namespace) -> int:
    """Train the missing models, print the table, and write probe.json and the report."""
    from cached_lab.experiments.probes.far_trials import FarTrials
    from cached_lab.experiments.reports.far_page import print_far, write_far_report
    from cached_lab.experiments.reports.probe_page import print_probe, write_probe_report
    from cached_lab.experiments.reports.terminal import open_console

    refuse_below_one(arguments, "distance", "seeds", "steps", "jobs", "far", "rows", "short_convolution")
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
    """Names of memories and tasks, and the options given for them and the models (ValueError for unknown names)."""
    from cached_lab.experiments.probes import settings

    files = {name: str(path) for name in settings.FILES if (path := getattr(arguments, name)) is not None}
    memories = settings.chosen_memories(arguments.memories)
    given: dict[str, list[str]] = {"memories": [], settings.MODEL: [], "tasks": []}
    for override in arguments.overrides:
        name = override.partition("=")[0].partition(".")[0]
        given[settings.MODEL if name == settings.MODEL else "memories" if name in memories else "tasks"].append(
            override
        )
    by_task = settings.chosen_tasks(tasks, files, given["tasks"])
    options = by_task | settings.options_of_memories(memories, given["memories"])
    return memories, list(by_task), options | settings.options_of_models(given[settings.MODEL])


def train_missing(trials: Trials, jobs: int, console: Console) -> None:
    """Train and test the missing models, and show the progress."""
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
    """The trainings (ValueError for options that exclude each other)."""
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
    given = {name: getattr(arguments, name) for name in ("solved", "recall")}
    course = Course(
        1 if nearest is None else nearest,
        farthest,
        through=through,
        **{name: value for name, value in given.items() if value is not None},
    )
    how = {"rows": arguments.rows or 64, "compiled": arguments.compile, "ceiling": not arguments.no_ceiling}
    how["begin_near"] = nearest is None
    return FarTrials(memories, tasks, farthest, *kept, taps or 3, course, arguments.far or 1_000_000, **how)


def _distances(text: str) -> tuple[int | None, int, tuple[int, ...]]:
    """Nearest and farthest distance of "A..B", "..B" (None: each task's nearest), a number or stages; the stages."""
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
