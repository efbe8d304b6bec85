"""`cached reproduce`: a table of the GRC paper as a comparison of memories at equal size, on the same tokens and seeds.

Finished runs are kept: the same command continues, and more seeds, or `--rows all` after `--rows paper`, extend it.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cached_transformers.cli.compare import Comparison, carry_out, parse_seeds
from cached_transformers.cli.variants import Variant, equal_parameters
from cached_transformers.config import RunConfig, check_sections, fill_from_data, load_config
from cached_transformers.registry import unknown_name
from cached_transformers.reproductions import REPRODUCTIONS, Reproduction, protocol
from cached_transformers.training.run import build_dataset
from cached_transformers.training.tasks import baselines


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    known = "\n".join(f"  {name:<10} {entry.summary}" for name, entry in REPRODUCTIONS.items())
    parser = subparsers.add_parser(
        "reproduce",
        help="run a table of the GRC paper: memories at equal size, over several seeds",
        epilog=f"reproductions:\n{known}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("reproduction", help="one of the names below")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the recipe, for all rows")
    parser.add_argument("--scale", choices=("small", "paper"), default="small", help="small: minutes a run on one core")
    parser.add_argument("--data", metavar="FOLDER", help="folder or archive with train, valid and test")
    parser.add_argument(
        "--rows", choices=("paper", "all"), default="paper", help="all: every other memory that can run, too"
    )
    parser.add_argument("--seeds", default="3", help="how many (3 means 0,1,2), or a list such as 0,1,7")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each in a process of its own")
    parser.add_argument("--out", type=Path, help="folder of the results (default: runs/NAME_SCALE)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train what is missing, then write compare.json and the report."""
    name, scale = arguments.reproduction, arguments.scale
    if name not in REPRODUCTIONS:
        raise ValueError(unknown_name("reproduction", name, list(REPRODUCTIONS)))
    table = REPRODUCTIONS[name]
    if arguments.data is None:
        raise ValueError(
            f"{name} at scale {scale} reads {table.files[scale]}; give --data FOLDER with its train, valid and test"
        )
    for key, option in (("training.seed", "--seeds"), ("data.path", "--data")):
        if any(override.startswith(f"{key}=") for override in arguments.overrides):
            raise ValueError(f"{key} is set by {option} in a reproduction; drop the override")
    if arguments.jobs < 1:
        raise ValueError(f"--jobs {arguments.jobs} must be at least 1")
    seeds = parse_seeds(arguments.seeds)
    recipe = load_config(table.recipes[scale], arguments.overrides)
    recipe = dataclasses.replace(recipe, data={**recipe.data, "path": arguments.data})
    for row in table.names(arguments.rows == "all"):  # before the data are read, which may take long
        check_sections(table.config(recipe, row))
    train = build_dataset(recipe, "train")
    scored = build_dataset(recipe, "validation" if recipe.training.test == "none" else "test")
    variants = arms(table, recipe, train.describe(), arguments.rows == "all")
    console = Console()
    print_sizes(variants, console)
    folder = arguments.out or Path("runs") / recipe.name
    comparison = Comparison(recipe, variants, seeds, folder, baselines(recipe, train, scored))
    return carry_out(comparison, arguments.jobs, console)


def arms(table: Reproduction, recipe: RunConfig, data: dict[str, Any], every: bool) -> list[Variant]:
    """The rows as variants with equally many parameters, the reference first.

    The largest row of the paper decides, whatever else is in the table, so that further rows leave finished runs valid.

    Args:
        data: what the training data say of themselves.
        every: the memories that the paper's table lacks, too.
    """
    variants = [Variant(name, fill_from_data(table.config(recipe, name), data)) for name in table.names(every)]
    equal = equal_parameters(variants, deciding=len(table.paper))
    return [dataclasses.replace(v, facts={**v.facts, "protocol": protocol(v.config)}) for v in equal]


def print_sizes(variants: list[Variant], console: Console) -> None:
    """Print the number of parameters of each row and the width that makes it so."""
    table = Table(title="equal size", title_justify="left", box=None, header_style="bold")
    table.add_column("variant")
    table.add_column("parameters", justify="right")
    table.add_column("feed_forward", justify="right")
    for variant in variants:
        table.add_row(variant.name, f"{variant.facts['matched_parameters']:,}", str(variant.facts["feed_forward"]))
    console.print(table)
