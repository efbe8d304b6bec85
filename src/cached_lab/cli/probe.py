"""`cached probe`: test what a memory holds, on tasks that only a memory can solve.

Trains a small language model on each task with each memory, with options that put the answer within its reach, with
options that put it beyond (if its theory knows a bound), and without the memory. With --train-distance each memory is
trained at many distances instead, and tested in texts of up to --far tokens, read as streams. Finished trainings are
kept: the same command continues after a stop.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import command_line, refuse_below_one, refuse_too_many_seeds

if TYPE_CHECKING:
    from rich.console import Console

    from cached_lab.experiments.probes.trials import Trials

OPTIONS = (
    "options of tasks and memories (see `cached explain NAME`), and of the models: model.width, depth, heads, "
    "feed_forward, batch_size, learning_rate, check_every, rows"
)
CONTROL = (
    "whole: attention over the whole text (by distance and on the leaderboard always trained), the bar of efficiency; "
    "window: for each memory a window whose state has as many bytes"
)
PROBE_ARGUMENTS = (
    ("overrides NAME.option=value*", str, OPTIONS),
    ("--control A,B,...", "", CONTROL),
    ("--jobs N", 1, "trainings at a time"),
    ("--babi PATH", Path, "bAbI's archive or folder, for the task 'babilong'"),
    ("--books FOLDER", Path, "folder of books, for the same task"),
)
TRAIN_DISTANCE = (
    "train with A to B segments between cue and question (0: both in one segment; ..B: from each task's nearest on; "
    "1,2,3,5: the farthest of each stage of the curriculum), and test at any distance up to --far tokens"
)
ARGUMENTS = (
    ("memories A,B,...", str, "names of memories, or 'all'"),
    *PROBE_ARGUMENTS,
    ("--tasks A,B,...", "latch,copy,recall", "tasks from `cached list probes`, or 'all'"),
    ("--distance N", 3, "segments between cue and question"),
    ("--seeds N", 1, "trainings of each kind"),
    ("--steps N", 2000, "steps at most; ends early when solved"),
    ("--out FOLDER", Path("runs/probe"), "folder of the results"),
    ("--short-convolution K", int, "tokens mixed before attention (default: 3 with --train-distance, else 1, none)"),
    ("--train-distance A..B", str, TRAIN_DISTANCE),
    ("--solved S", 0.99, "by distance: share of right answers that ends a stage of the curriculum"),
    ("--recall W", 0.0, "by distance: weight of an auxiliary loss: reconstruct each segment from the memory"),
    ("--far N", 1_000_000, "by distance: tokens of the longest tested text"),
    ("--rows N", 64, "by distance: texts of each length"),
    ("--no-ceiling", bool, "by distance: do not train attention over the whole text, whose cost is quadratic"),
    ("--compile", bool, "by distance: read texts of 10,000 segments and more with a compiled model"),
)


def run(arguments: argparse.Namespace) -> int:
    """Train the missing models, print the table, and write probe.json or far.json and the report."""
    from cached_lab.experiments.reports.probe_page import probe_tables, write_probe_report
    from cached_lab.experiments.reports.terminal import open_console, show

    refuse_below_one(arguments, "distance", "seeds", "steps", "jobs", "far", "rows", "short_convolution")
    refuse_too_many_seeds(arguments.seeds)
    trials = _trials(arguments, *chosen(arguments, arguments.tasks))
    console = open_console()
    train_missing(trials, arguments.jobs, console)
    show(console, *probe_tables(trials.write(command_line())))
    path = arguments.out / ("probe.json" if arguments.train_distance is None else "far.json")
    try:
        path = write_probe_report(path)
    except ImportError as error:
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
        kind = settings.MODEL if name == settings.MODEL else "memories" if name in memories else "tasks"
        given[kind].append(override)
    by_task = settings.chosen_tasks(tasks, files, given["tasks"])
    options = by_task | settings.options_of_memories(memories, given["memories"])
    return memories, list(by_task), options | settings.options_of_models(given[settings.MODEL])


def train_missing(trials: Trials, jobs: int, console: Console) -> None:
    """Train and test the missing models, and show the progress."""
    missing = trials.missing()
    if len(missing) < len(trials.all()):
        console.print(f"{len(trials.all()) - len(missing)} finished trainings kept, {len(missing)} to do")
    with contextlib.closing(trials.train(missing, jobs)) as results:
        for trial, result in results:
            print(trial.sentence(result), flush=True)


def _trials(arguments: argparse.Namespace, memories: list[str], tasks: list[str], options: dict[str, Any]) -> Trials:
    from cached_lab.experiments.probes.distances import Course
    from cached_lab.experiments.probes.far_trials import FarTrials
    from cached_lab.experiments.probes.trials import CONTROLS, Trials
    from cached_lab.experiments.variants import chosen_controls

    how: dict[str, Any] = {"controls": chosen_controls(arguments.control, CONTROLS)}
    taps, kept = arguments.short_convolution, (arguments.seeds, arguments.steps, arguments.out, options)
    if arguments.train_distance is None:
        return Trials(memories, tasks, arguments.distance, *kept, taps or 1, **how)
    if arguments.no_ceiling and "whole" in how["controls"]:
        raise ValueError("--no-ceiling and --control whole contradict each other; leave out one of them")
    nearest, farthest, through = _distances(arguments.train_distance)
    begin, near = (1, True) if nearest is None else (nearest, False)
    course = Course(begin, farthest, through=through, solved=arguments.solved, recall=arguments.recall)
    how |= {"rows": arguments.rows, "compiled": arguments.compile, "ceiling": not arguments.no_ceiling}
    return FarTrials(memories, tasks, farthest, *kept, taps or 3, course, arguments.far, begin_near=near, **how)


def _distances(text: str) -> tuple[int | None, int, tuple[int, ...]]:
    """Nearest and farthest distance of "A..B", "..B" (None: each task's nearest), a number or stages; the stages."""
    if not re.fullmatch(r"\d*\.\.\d+|\d+(,\d+)*", text):
        raise ValueError(
            f"--train-distance {text!r} must be A..B or ..B, segments from cue to question, e.g. 1..7, "
            "or stages, e.g. 1,2,3,5"
        )
    found = tuple(map(int, re.findall(r"\d+", text)))
    return None if text.startswith(".") else found[0], found[-1], found if "," in text else ()
