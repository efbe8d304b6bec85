"""`cached reproduce`: run a table of the GRC paper as rows of equal size or cost, on the same data and seeds.

Finished runs are kept: the same command continues, and more seeds, or `--rows all` after `--rows paper`, extend it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from cached_lab.resources import read_facts
from cached_transformers.registry import unknown_name

from .arguments import command_line, refuse_below_one
from .compare import parse_seeds

TABLES = sorted(read_facts()["reproductions"], key=lambda table: (len(table["name"]), table["name"]))
ARGUMENTS = (
    ("reproduction TABLE", str, "; ".join(f"{table['name']}: {table['summary']}" for table in TABLES)),
    ("overrides key=value*", str, "changes to the recipe, for all rows"),
    ("--scale", ("small", "paper"), "small: minutes a run on one core"),
    ("--data FOLDER", str, "the data of the table (table4: pairs of texts; table5: text; others: images)"),
    ("--rows paper|all|A,B", "paper", "all: also rows that the paper lacks; or rows by name"),
    ("--seeds N", "3", "how many (3 means 0,1,2), or a list such as 0,1,7"),
    ("--jobs N", 1, "runs at a time, each in its own process"),
    ("--out FOLDER", Path, "folder of the results (default: runs/NAME_SCALE)"),
)


def run(arguments: argparse.Namespace) -> int:
    """Train the missing runs, then write compare.json and the report; or measure a table of costs."""
    from cached_lab.experiments.compare import carry_out
    from cached_lab.experiments.reports.terminal import open_console
    from cached_lab.experiments.reproductions import MEASURED, REPRODUCTIONS
    from cached_lab.experiments.reproductions.arms import comparison
    from cached_lab.experiments.reproductions.table9 import measure

    name, scale, rows, command = arguments.reproduction, arguments.scale, arguments.rows, command_line()
    if name in MEASURED:
        if arguments.data is not None or arguments.seeds != "3":
            raise ValueError(f"{name} trains nothing and reads no data; drop --data and --seeds")
        folder = arguments.out or Path("runs") / f"{name}_{scale}"
        print(measure(scale, rows, arguments.overrides, folder, command))
        print(f"written: {folder / 'throughput.md'}")
        return 0
    if name not in REPRODUCTIONS:
        raise ValueError(unknown_name("reproduction", name, [*REPRODUCTIONS, *MEASURED]))
    for key, option in (("training.seed", "--seeds"), ("data.path", "--data")):
        if any(override.startswith(f"{key}=") for override in arguments.overrides):
            raise ValueError(f"{key} is set by {option} in a reproduction; drop the override")
    refuse_below_one(arguments, "jobs")
    about = {"chosen": rows, "overrides": arguments.overrides, "data": arguments.data, "folder": arguments.out}
    compared = comparison(REPRODUCTIONS[name], name, scale, seeds=parse_seeds(arguments.seeds), **about)
    carry_out(compared, arguments.jobs, command, open_console())
    return 0
