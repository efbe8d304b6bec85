"""`cached train`: one run from a recipe."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from cached_transformers.experiments.run import run_training
from cached_transformers.registry import MODELS
from cached_transformers.tasks.recipes import LEARNED_FROM_DATA, load_config
from cached_transformers.training.config import RunConfig, config_to_yaml


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser("train", help="train a recipe; interrupted runs continue where they stopped")
    parser.add_argument("recipe", help="a path, or a name from `cached list recipes`")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="e.g. training.steps=100 model.memory.ratio=0.25"
    )
    parser.add_argument("--out", type=Path, help="run folder (default: runs/NAME)")
    parser.add_argument("--dry-run", action="store_true", help="print the checked configuration and stop")
    parser.add_argument("--resume", default="auto", metavar="auto|never|PATH", help="checkpoint to continue from")
    parser.add_argument("--variant", help="name of this run in comparisons (default: the name of its memory)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train, or with --dry-run print what would be trained."""
    config = load_config(arguments.recipe, arguments.overrides)
    if arguments.dry_run:
        print(config_to_yaml(config), end="")
        print(describe_rest(config))
        return 0
    folder = arguments.out or Path("runs") / config.name
    run_training(config, folder, arguments.resume, Console(), arguments.variant)
    return 0


def describe_rest(config: RunConfig) -> str:
    """A YAML comment that says which options the data will fill in."""
    options = MODELS.entry(config.model["name"]).options
    open_options = [f"model.{key}" for key in LEARNED_FROM_DATA if key in options and key not in config.model]
    return f"# filled in from the data: {', '.join(open_options) or 'nothing'}"
