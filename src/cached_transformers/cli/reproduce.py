"""`cached reproduce`: a table of the GRC paper as a comparison of equal rows, on the same data and seeds.

Finished runs are kept: the same command continues, and more seeds, or `--rows all` after `--rows paper`, extend it.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cached_transformers.experiments import throughput
from cached_transformers.experiments.build import build_dataset
from cached_transformers.experiments.reproductions import MEASURED, REPRODUCTIONS, Reproduction, Row
from cached_transformers.experiments.reproductions.base import pairs
from cached_transformers.experiments.variants import Variant, equal_operations, equal_parameters
from cached_transformers.registry import unknown_name
from cached_transformers.tasks.kinds import baselines, task_name
from cached_transformers.tasks.recipes import check_sections, fill_from_data, load_config
from cached_transformers.training.config import RunConfig

from .compare import Comparison, carry_out, parse_seeds


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    summaries = {name: entry.summary for name, entry in REPRODUCTIONS.items()}
    summaries |= {name: entry.summary for name, entry in MEASURED.items()}
    known = "\n".join(f"  {name:<10} {summaries[name]}" for name in sorted(summaries, key=lambda n: (len(n), n)))
    parser = subparsers.add_parser(
        "reproduce",
        help="run a table of the GRC paper: rows of equal size or cost, over several seeds",
        epilog=f"reproductions:\n{known}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("reproduction", help="one of the names below")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the recipe, for all rows")
    parser.add_argument("--scale", choices=("small", "paper"), default="small", help="small: minutes a run on one core")
    parser.add_argument(
        "--data",
        metavar="FOLDER",
        help="the data that a table reads (table4: pairs of texts; table5: text; others: images)",
    )
    parser.add_argument(
        "--rows", default="paper", metavar="paper|all|A,B", help="all: what the paper lacks, too; or rows by name"
    )
    parser.add_argument("--seeds", help="how many (3, the default, means 0,1,2), or a list such as 0,1,7")
    parser.add_argument("--jobs", type=int, help="runs at a time, each in a process of its own (default: 1)")
    parser.add_argument("--out", type=Path, help="folder of the results (default: runs/NAME_SCALE)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train what is missing, then write compare.json and the report."""
    name, scale = arguments.reproduction, arguments.scale
    if name in MEASURED:
        return throughput.reproduce(MEASURED[name], arguments)
    if name not in REPRODUCTIONS:
        raise ValueError(unknown_name("reproduction", name, [*REPRODUCTIONS, *MEASURED]))
    table = REPRODUCTIONS[name]
    files = table.files.get(scale)
    if files is not None and arguments.data is None:
        raise ValueError(f"{name} at scale {scale} reads {files}; give --data FOLDER")
    if files is None and arguments.data is not None:
        raise ValueError(f"{name} generates its data; drop --data {arguments.data}")
    for key, option in (("training.seed", "--seeds"), ("data.path", "--data")):
        if any(override.startswith(f"{key}=") for override in arguments.overrides):
            raise ValueError(f"{key} is set by {option} in a reproduction; drop the override")
    jobs = 1 if arguments.jobs is None else arguments.jobs
    if jobs < 1:
        raise ValueError(f"--jobs {jobs} must be at least 1")
    seeds = parse_seeds("3" if arguments.seeds is None else arguments.seeds)
    rows = table.rows(scale, arguments.rows)
    recipe = load_config(table.recipes[scale], arguments.overrides)
    if files is not None:
        recipe = dataclasses.replace(recipe, data={**recipe.data, "path": arguments.data})
    recipes = own_recipes(rows, recipe, arguments.overrides)
    for row in rows:  # before the data are read, which may take long
        check_sections(row.config(recipes.get(row.recipe, recipe)))
    train = build_dataset(recipe, "train")
    scored = build_dataset(recipe, "validation" if recipe.training.test == "none" else "test")
    variants = arms(table, scale, rows, recipe, train, recipes)
    console = Console()
    print_sizes(variants, console)
    recipe = dataclasses.replace(recipe, name=f"{name}_{scale}")  # where several tables share one
    folder = arguments.out or Path("runs") / recipe.name
    number = len(scored) if task_name(scored) == "classification" else None
    found = baselines(recipe, train, scored)
    comparison = Comparison(
        recipe, variants, seeds, folder, found, pairs=pairs(rows), rows=number, cache_use=table.cache_use
    )
    return carry_out(comparison, jobs, console)


def own_recipes(rows: Sequence[Row], recipe: RunConfig, overrides: Sequence[str]) -> dict[str | None, RunConfig]:
    """The recipes of rows that have one of their own, with the overrides and the data of the table's.

    Raises:
        ValueError: one that is not scored as the table's is.
    """
    found: dict[str | None, RunConfig] = {}
    for name in dict.fromkeys(row.recipe for row in rows if row.recipe is not None):
        own = load_config(name, overrides)
        scored = [(config.training.metric, config.training.test) for config in (own, recipe)]
        if scored[0] != scored[1]:
            raise ValueError(
                f"recipe {name} is scored by {scored[0]} (training.metric, training.test), {recipe.name} by "
                f"{scored[1]}; rows of a table are scored alike, so set both"
            )
        found[name] = dataclasses.replace(own, data=recipe.data)
    return found


def arms(
    table: Reproduction,
    scale: str,
    rows: Sequence[Row],
    recipe: RunConfig,
    train: Any,
    recipes: Mapping[str | None, RunConfig] | None = None,
) -> list[Variant]:
    """The rows as variants of equal size or cost.

    Rows of the paper decide on it, whatever else is in the table, so that further rows leave finished runs valid.

    Args:
        train: the training data, which say of themselves what a model must know.
        recipes: by name, those of rows that have one of their own.
    """
    paper, known = table.paper(scale), {row.name: row for row in table.rows(scale, "all")}
    needed = {row.name: row for row in rows}
    needed |= {row.matched: known[row.matched] for row in rows if row.matched is not None}
    every = [*paper, *(row for name, row in needed.items() if name not in {other.name for other in paper})]
    own = recipes or {}
    variants = [
        Variant(row.name, fill_from_data(row.config(own.get(row.recipe, recipe)), train.describe()))
        for row in every
        if table.equal == "parameters" or row.name in needed
    ]
    if table.equal == "parameters":
        equal = equal_parameters(variants, deciding=len(paper))
    else:
        matched = {row.name: row.matched for row in every if row.matched is not None and row.name in needed}
        equal = equal_operations(variants, matched, train)
    by_name = {variant.name: variant for variant in equal}
    return [_with_facts(by_name[row.name], row, table) for row in rows]


def _with_facts(variant: Variant, row: Row, table: Reproduction) -> Variant:
    """The variant with what the table says of it."""
    facts = {**variant.facts, "protocol": table.protocol(variant.config)}
    if row.backbone is not None:
        facts["backbone"] = row.backbone
    return dataclasses.replace(variant, facts=facts)


def print_sizes(variants: list[Variant], console: Console) -> None:
    """Print what was made equal, parameters or operations, and the width that makes it so."""
    operations = "training_flops" in variants[0].facts
    title = "operations of a forward pass in training, per row" if operations else "equal size"
    table = Table(title=title, title_justify="left", box=None, header_style="bold")
    table.add_column("variant")
    for column in ["operations" if operations else "parameters", "feed_forward"] + (["equal to"] if operations else []):
        table.add_column(column, justify="right")
    for variant in variants:
        facts = variant.facts
        count = facts["training_flops" if operations else "matched_parameters"]
        cells = [variant.name, f"{count:,}", str(facts["feed_forward"])]
        if "matched" in facts:
            cells.append(f"{facts['matched']} (ratio {facts['flops_ratio']:.4f})")
        table.add_row(*cells)
    console.print(table)
