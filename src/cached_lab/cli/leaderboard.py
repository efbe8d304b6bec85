"""`cached leaderboard`: every memory on a few probe tasks, by distance, with its costs, in one sorted table.

Trains a small language model with each memory on each task, as `cached probe --train-distance` does, and measures the
costs. The model without a memory and attention over the whole text are included. Finished trainings and answers are
kept: the same command continues after a stop.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .arguments import command_line, refuse_below_one, refuse_too_many_seeds
from .probe import PROBE_ARGUMENTS, chosen, train_missing

ARGUMENTS = (
    *PROBE_ARGUMENTS,
    ("--memories A,B,...", "all", "names, or 'all'"),
    ("--tasks A,B,...", str, "tasks from `cached list probes`, or 'all' (default: the board's)"),
    ("--seeds N", int, "trainings of each kind (default: 1)"),
    ("--steps N", int, "steps at most (default: 800)"),
    ("--out FOLDER", Path("runs/leaderboard"), "folder of the results"),
    ("--merge FOLDER", Path, "a folder of this command from elsewhere: its trainings are checked, and kept if right"),
    ("--page FILE.md", Path, "the page, or an existing one with marks for its part (default: leaderboard.md in --out)"),
)


def run(arguments: argparse.Namespace) -> int:
    """Train the missing models, print the tables, and write leaderboard.json and the page."""
    from cached_lab.experiments.leaderboard.standings import FILE, TASKS, board_trials, write_leaderboard
    from cached_lab.experiments.probes.trials import CONTROLS
    from cached_lab.experiments.reports.board_page import board_tables, refuse_page, write_board_page
    from cached_lab.experiments.reports.terminal import open_console, show
    from cached_lab.experiments.variants import chosen_controls

    refuse_below_one(arguments, "seeds", "steps", "jobs")
    refuse_too_many_seeds(arguments.seeds or 1)
    page = arguments.page or arguments.out / "leaderboard.md"
    refuse_page(page)
    memories, tasks, options = chosen(arguments, arguments.tasks or ",".join(TASKS))
    how: dict[str, Any] = {"seeds": arguments.seeds, "steps": arguments.steps}
    how["controls"] = chosen_controls(arguments.control, CONTROLS)
    trials = board_trials(memories, tasks, arguments.out, options, **how)
    console = open_console()
    if arguments.merge is not None:
        for trial in trials.merge(arguments.merge):
            console.print(f"merged: {trial.name}", markup=False)
    train_missing(trials, arguments.jobs, console)
    content = write_leaderboard(trials, command_line())
    show(console, *board_tables(content))
    write_board_page(page, content)
    console.print(f"written: {page}, {arguments.out / FILE}", markup=False, soft_wrap=True)
    return 0
