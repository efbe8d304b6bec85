"""`cached leaderboard`: every memory on a few probe tasks, by distance, with what it costs, in one sorted table."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .arguments import command_line, refuse_below_one, refuse_too_many_seeds
from .probe import add_options, chosen, train_missing


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "leaderboard",
        help="every memory on a few probe tasks, with what it costs, sorted",
        description="Trains a small language model with each memory on each task at several distances, as `cached "
        "probe --train-distance` does, asks at the farthest of them and in longer texts, measures what each memory "
        "costs, and writes one page. Beside the memories stand the model without one and attention over the whole "
        "text. Finished trainings and answers are kept: the same command goes on where it was stopped.",
        epilog="examples: cached leaderboard --jobs 2; cached leaderboard --memories rmt,transformer_xl rmt.length=8 "
        "--tasks latch,mqar --seeds 3",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--quick", action="store_true", help="four tasks, one seed: an hour or two on 2 cores (the default)"
    )
    size.add_argument(
        "--full", action="store_true", help="six tasks, longer distances, three seeds: a night on 2 cores"
    )
    parser.add_argument("--memories", default="all", help="names, separated by commas, or 'all' (the default)")
    parser.add_argument("--tasks", help="tasks from `cached list probes`, by commas, or 'all' (default: the board's)")
    add_options(parser)
    parser.add_argument("--seeds", type=int, help="trainings of each kind (default: 1, or 3 with --full)")
    parser.add_argument("--steps", type=int, help="steps at most (default: 800, or 2000 with --full)")
    parser.add_argument("--out", type=Path, default=Path("runs/leaderboard"), help="folder (default: runs/leaderboard)")
    parser.add_argument(
        "--page",
        type=Path,
        metavar="FILE.md",
        help="the page; of one that is there, the part between the marks is written (default: leaderboard.md in --out)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train what is missing, print the tables, and write leaderboard.json and the page."""
    from cached_lab.experiments.leaderboard.boards import BOARDS
    from cached_lab.experiments.leaderboard.standings import FILE, write_leaderboard
    from cached_lab.experiments.reports.board_page import print_board, refuse_page, write_board_page
    from cached_lab.experiments.reports.terminal import open_console

    refuse_below_one(arguments, "seeds", "steps", "jobs")
    refuse_too_many_seeds(arguments.seeds or 1)
    page = arguments.page or arguments.out / "leaderboard.md"
    refuse_page(page)
    name = "full" if arguments.full else "quick"
    board = BOARDS[name]
    memories, tasks, options = chosen(arguments, arguments.tasks or ",".join(board.tasks))
    trials = board.trials(memories, tasks, arguments.out, options, seeds=arguments.seeds, steps=arguments.steps)
    console = open_console()
    train_missing(trials, arguments.jobs, console)
    content = write_leaderboard(trials, name, board, command_line())
    print_board(content, console)
    write_board_page(page, content)
    console.print(f"written: {page}, {arguments.out / FILE}", markup=False, soft_wrap=True)
    return 0
