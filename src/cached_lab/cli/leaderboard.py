"""`cached leaderboard`: every memory on a few probe tasks, by distance, with its costs, in one sorted table."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .arguments import add_command, command_line, refuse_below_one, refuse_too_many_seeds
from .probe import add_options, chosen, train_missing


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = add_command(
        subparsers,
        "leaderboard",
        run,
        "every memory on a few probe tasks, with its costs, sorted",
        description="Trains a small language model with each memory on each task at several distances, as `cached "
        "probe --train-distance` does, tests it at the farthest of them and in longer texts, measures the costs of "
        "each memory, and writes one page. The model without a memory and attention over the whole text are included. "
        "Finished trainings and answers are kept: the same command continues after a stop.",
        epilog="examples: cached leaderboard --jobs 2; cached leaderboard --memories rmt,transformer_xl rmt.length=8 "
        "--tasks latch,mqar --seeds 3",
    )
    parser.add_argument("--memories", default="all", help="names, separated by commas, or 'all' (the default)")
    parser.add_argument("--tasks", help="tasks from `cached list probes`, by commas, or 'all' (default: the board's)")
    add_options(parser)
    parser.add_argument("--seeds", type=int, help="trainings of each kind (default: 1)")
    parser.add_argument("--steps", type=int, help="steps at most (default: 800)")
    parser.add_argument("--out", type=Path, default=Path("runs/leaderboard"), help="folder (default: runs/leaderboard)")
    page = "the page; in an existing one, the part between the marks is replaced (default: leaderboard.md in --out)"
    parser.add_argument("--page", type=Path, metavar="FILE.md", help=page)


def run(arguments: argparse.Namespace) -> int:
    """Train the missing models, print the tables, and write leaderboard.json and the page."""
    from cached_lab.experiments.leaderboard.boards import TASKS, board_trials
    from cached_lab.experiments.leaderboard.standings import FILE, write_leaderboard
    from cached_lab.experiments.reports.board_page import print_board, refuse_page, write_board_page
    from cached_lab.experiments.reports.terminal import open_console

    refuse_below_one(arguments, "seeds", "steps", "jobs")
    refuse_too_many_seeds(arguments.seeds or 1)
    page = arguments.page or arguments.out / "leaderboard.md"
    refuse_page(page)
    memories, tasks, options = chosen(arguments, arguments.tasks or ",".join(TASKS))
    trials = board_trials(memories, tasks, arguments.out, options, seeds=arguments.seeds, steps=arguments.steps)
    console = open_console()
    train_missing(trials, arguments.jobs, console)
    content = write_leaderboard(trials, command_line())
    print_board(content, console)
    write_board_page(page, content)
    console.print(f"written: {page}, {arguments.out / FILE}", markup=False, soft_wrap=True)
    return 0
