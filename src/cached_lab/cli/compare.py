"""`cached compare`: train variants of a recipe on the same seeds and data order, with paired statistics."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .arguments import add_command, add_recipe, command_line, refuse_below_one, refuse_too_many_seeds, whole_numbers


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = add_command(subparsers, "compare", run, "train variants of a recipe over several seeds, and compare them")
    add_recipe(parser, "changes to the recipe, for all variants")
    parser.add_argument(
        "--with", dest="variants", required=True, metavar="A,B,...", help="plain, a memory, or memory:option=value:..."
    )
    parser.add_argument("--seeds", default="3", help="how many (3 means 0,1,2), or a list such as 0,1,7")
    parser.add_argument(
        "--control",
        default="",
        metavar="A,B,...",
        help="conv: no memory but its positional convolution; flops, parameters: no memory, feed-forward widened to "
        "the count of the largest variant; longer: no memory, segments twice as long",
    )
    parser.add_argument(
        "--against",
        default="",
        metavar="VARIANT",
        help="test all others against this variant or control (control-conv, ...), paired by seed (default: plain, or "
        "else the first)",
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each in its own process")
    parser.add_argument("--out", type=Path, help="folder of the comparison (default: runs/compare_NAME)")


def run(arguments: argparse.Namespace) -> int:
    """Train the missing runs, then write compare.json and the report."""
    from cached_lab.experiments.compare import VariantComparison, carry_out
    from cached_lab.experiments.reports.terminal import open_console
    from cached_lab.experiments.variants import prepare
    from cached_lab.tasks.recipes import load_config

    if any(override.startswith("training.seed=") for override in arguments.overrides):
        raise ValueError("training.seed is set by --seeds in a comparison; drop the override")
    refuse_below_one(arguments, "jobs")
    seeds = parse_seeds(arguments.seeds)
    recipe = load_config(arguments.recipe, arguments.overrides)
    folder = arguments.out or Path("runs") / f"compare_{recipe.name}"
    variants, baselines = prepare(recipe, arguments.variants.split(","), arguments.control, arguments.against)
    comparison = VariantComparison(recipe, variants, seeds, folder, baselines, against=arguments.against)
    carry_out(comparison, arguments.jobs, command_line(), open_console())
    return 0


def parse_seeds(text: str) -> list[int]:
    """Parse seeds from `3` (0, 1, 2) or `0,1,7`.

    Raises:
        ValueError: not whole numbers, none, too many, negative, or repeated.
    """
    seeds = whole_numbers(",".join(part for part in text.split(",") if part))
    if len(seeds) == 1 and "," not in text:
        refuse_too_many_seeds(seeds[0])
        seeds = list(range(seeds[0]))
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds {text!r} must be a number of seeds (3) or different whole numbers (0,1,7)")
    return seeds
