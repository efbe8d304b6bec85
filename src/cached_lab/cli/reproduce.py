"""`cached reproduce`: a table of the GRC paper as a comparison of equal rows, on the same data and seeds.

Finished runs are kept: the same command continues, and more seeds, or `--rows all` after `--rows paper`, extend it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cached_lab.resources import read_facts
from cached_transformers.registry import unknown_name

from .arguments import add_command, command_line, refuse_below_one
from .compare import parse_seeds


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    tables = sorted(read_facts()["reproductions"], key=lambda table: (len(table["name"]), table["name"]))
    listed = "\n".join(f"  {table['name']:<10} {table['summary']}" for table in tables)
    parser = add_command(
        subparsers,
        "reproduce",
        run,
        "run a table of the GRC paper: rows of equal size or cost, over several seeds",
        epilog=f"reproductions:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("reproduction", help="one of the names below")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the recipe, for all rows")
    parser.add_argument("--scale", choices=("small", "paper"), default="small", help="small: minutes a run on one core")
    data = "the data of the table (table4: pairs of texts; table5: text; others: images)"
    parser.add_argument("--data", metavar="FOLDER", help=data)
    rows = "all: also rows that the paper lacks; or rows by name"
    parser.add_argument("--rows", default="paper", metavar="paper|all|A,B", help=rows)
    parser.add_argument("--seeds", help="how many (3, the default, means 0,1,2), or a list such as 0,1,7")
    parser.add_argument("--jobs", type=int, help="runs at a time, each in its own process (default: 1)")
    parser.add_argument("--out", type=Path, help="folder of the results (default: runs/NAME_SCALE)")


def run(arguments: argparse.Namespace) -> int:
    """Train the missing runs, then write compare.json and the report; or measure a table of costs."""
    from cached_lab.experiments.compare import carry_out
    from cached_lab.experiments.reports.run_page import print_sizes
    from cached_lab.experiments.reports.terminal import open_console
    from cached_lab.experiments.reproductions import MEASURED, REPRODUCTIONS
    from cached_lab.experiments.reproductions.arms import comparison
    from cached_lab.experiments.reproductions.table9 import measure

    name, scale, command = arguments.reproduction, arguments.scale, command_line()
    if name in MEASURED:
        for key in ("data", "seeds", "jobs"):
            if getattr(arguments, key) is not None:
                raise ValueError(f"{name} trains nothing and reads no data; drop --{key}")
        folder = arguments.out or Path("runs") / f"{name}_{scale}"
        print(measure(scale, arguments.rows, arguments.overrides, folder, command))
        print(f"written: {folder / 'throughput.md'}")
        return 0
    if name not in REPRODUCTIONS:
        raise ValueError(unknown_name("reproduction", name, [*REPRODUCTIONS, *MEASURED]))
    for key, option in (("training.seed", "--seeds"), ("data.path", "--data")):
        if any(override.startswith(f"{key}=") for override in arguments.overrides):
            raise ValueError(f"{key} is set by {option} in a reproduction; drop the override")
    refuse_below_one(arguments, "jobs")
    console = open_console()
    compared = comparison(
        REPRODUCTIONS[name],
        name,
        scale,
        chosen=arguments.rows,
        overrides=arguments.overrides,
        data=arguments.data,
        seeds=parse_seeds("3" if arguments.seeds is None else arguments.seeds),
        folder=arguments.out,
    )
    print_sizes({variant.name: variant.facts for variant in compared.variants}, console)
    carry_out(compared, arguments.jobs or 1, command, console)
    return 0
