"""`cached compare`: train variants of a recipe on the same seeds and data order, with paired statistics."""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import command_line, recipe_arguments, refuse_below_one, refuse_too_many_seeds

CONTROL = (
    "conv: no memory but its positional convolution; flops, parameters: no memory, feed-forward widened to the count "
    "of the largest variant; longer: no memory, segments twice as long; window: for each memory a window whose state "
    "has as many bytes; whole: no memory, each document in one segment, the bar of efficiency"
)
ARGUMENTS = (
    *recipe_arguments("changes to the recipe, for all variants"),
    ("--with A,B,...", "plain", "variants: plain, or memories and an attention, NAME:option=value:...+NAME:..."),
    ("--tune OPTION=A,B,...", str, "each variant takes the value that validates best with the first seed"),
    ("--seeds N", "3", "how many (3 means 0,1,2), or a list such as 0,1,7"),
    ("--control A,B,...", "", CONTROL),
    ("--against VARIANT", "", "the variant or control that the others are tested against; else plain or the first"),
    ("--jobs N", 1, "runs at a time, each in its own process"),
    ("--out FOLDER", Path, "folder of the comparison (default: runs/compare_NAME)"),
)


def run(arguments: argparse.Namespace) -> int:
    """Train the missing runs, then write compare.json and the report."""
    from cached_lab.experiments.compare import VariantComparison, carry_out
    from cached_lab.experiments.reports.terminal import open_console
    from cached_lab.experiments.variants import prepare
    from cached_lab.tasks.recipes import load_config

    if any(override.startswith("training.seed=") for override in arguments.overrides):
        raise ValueError("training.seed is set by --seeds in a comparison; drop the override")
    refuse_below_one(arguments, "jobs")
    seeds, tune = parse_seeds(arguments.seeds), parse_tune(arguments.tune)
    recipe = load_config(arguments.recipe, arguments.overrides)
    folder = arguments.out or Path("runs") / f"compare_{recipe.name}"
    variants, baselines = prepare(recipe, getattr(arguments, "with").split(","), arguments.control, arguments.against)
    comparison = VariantComparison(recipe, variants, seeds, folder, baselines, against=arguments.against, tune=tune)
    carry_out(comparison, arguments.jobs, command_line(), open_console())
    return 0


def parse_tune(text: str | None) -> tuple[str, list[str]] | None:
    """Parse an option and its values from `optimizer.learning_rate=1e-3,3e-3` (ValueError: another section)."""
    if text is None:
        return None
    option, _, listed = text.partition("=")
    values = [value for value in listed.split(",") if value]
    if option.partition(".")[0] not in ("optimizer", "schedule") or len({*values}) < 2:  # others change equal sizes
        raise ValueError(
            f"--tune {text!r} must be an option of optimizer or schedule and two values or more: "
            "optimizer.learning_rate=1e-3,3e-3"
        )
    return option, values


def parse_seeds(text: str) -> list[int]:
    """Parse seeds from `3` (0, 1, 2) or `0,1,7`.

    Raises:
        ValueError: not whole numbers, none, too many, negative, or repeated.
    """
    parts = [part for part in text.split(",") if part]
    seeds = [int(part) for part in parts if part.isdecimal()]
    refuse_too_many_seeds(seeds[0] if seeds else 0)
    found = list(range(seeds[0])) if len(seeds) == 1 and "," not in text else seeds
    if not found or len(set(seeds)) < len(parts):
        raise ValueError(f"--seeds {text!r} must be a number of seeds (3) or different whole numbers (0,1,7)")
    return found
