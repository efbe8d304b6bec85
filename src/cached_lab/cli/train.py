"""`cached train`: train a recipe; interrupted runs continue from their last save."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import recipe_arguments

if TYPE_CHECKING:
    from cached_lab.training.config import RunConfig

ARGUMENTS = (
    *recipe_arguments("e.g. training.steps=100 model.memory.ratio=0.25"),
    ("--out FOLDER", Path, "run folder (default: runs/NAME)"),
    ("--dry-run", bool, "print the checked configuration and stop"),
    ("--resume HOW", "auto", "auto: from the newest checkpoint (anyway: even if the data changed); never; or a PATH"),
    ("--variant NAME", str, "name of this run in comparisons (default: the name of its memory)"),
)


def run(arguments: argparse.Namespace) -> int:
    """Train; with --dry-run build the model without weights and print its configuration."""
    from cached_lab.experiments.reports.terminal import open_console
    from cached_lab.experiments.run import run_training
    from cached_lab.tasks.recipes import load_config

    config = load_config(arguments.recipe, arguments.overrides)
    if arguments.dry_run:
        print(describe(config), end="")
        return 0
    folder = arguments.out or Path("runs") / config.name
    run_training(config, folder, arguments.resume, open_console(), arguments.variant)
    return 0


def describe(config: RunConfig) -> str:
    """The configuration as YAML, with comments on options that the data fill in and on checks that were impossible.

    Raises:
        ValueError: a model of this configuration cannot be built.
    """
    from cached_lab.experiments.build import filled, refuse_what_cannot_be_built
    from cached_lab.tasks.recipes import LEARNED_FROM_DATA
    from cached_lab.training.config import config_to_yaml
    from cached_transformers.registry import MODELS

    options = MODELS.entry(config.model["name"]).options
    open_options = [f"model.{key}" for key in LEARNED_FROM_DATA if key in options and key not in config.model]
    text = f"{config_to_yaml(config)}# filled in from the data: {', '.join(open_options) or 'nothing'}\n"
    try:
        refuse_what_cannot_be_built(filled(config))
    except (FileNotFoundError, ImportError) as error:  # a dry run may lack the data and libraries of the training
        return f"{text}# whether the model can be built is not known: {' '.join(str(error).split())}\n"
    return text
