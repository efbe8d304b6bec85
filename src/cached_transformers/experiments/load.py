"""What a run folder holds, read back: configuration, trained model, and a detector's classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from cached_transformers.tasks.recipes import config_from_dict
from cached_transformers.training.checkpoint import Checkpoints, read_checkpoint
from cached_transformers.training.checkpoint_average import load_average
from cached_transformers.training.config import RunConfig
from cached_transformers.training.run_files import CATEGORIES
from cached_transformers.training.same_data import refuse_exchanged
from cached_transformers.yaml_tree import parse_yaml

from .build import build_model, without_checkpoint


def load_run(
    folder: str | Path, checkpoint: str = "best", average: int | None = None
) -> tuple[RunConfig, nn.Module, int]:
    """Configuration, model with its trained weights, and step of a run folder.

    Args:
        folder: a run folder.
        checkpoint: "best", "last", "tested" (what the summary's test scores are of), or the path of a step folder.
        average: with "tested", so many newest checkpoints are averaged instead; caches as `training.average_caches`.

    Raises:
        ValueError: not a run folder, or the checkpoint is missing or damaged.
    """
    folder, config = Path(folder), read_run_config(folder)
    if average is not None and checkpoint != "tested":
        raise ValueError(f"--checkpoint {checkpoint} and --average {average} name different weights; give one of them")
    if checkpoint == "tested":
        checkpoint = "last" if config.training.test == "last" else "best"
        average = config.training.average_last if average is None and config.training.average_last > 1 else average
    if average is not None:
        refuse_exchanged(folder, read_checkpoint(Checkpoints(folder / "checkpoints").named("last")))
        model = build_model(without_checkpoint(config))
        return config, model, load_average(model, folder, average, config.training.average_caches)
    path = Checkpoints(folder / "checkpoints").named(checkpoint) if checkpoint in ("best", "last") else Path(checkpoint)
    stored = read_checkpoint(path)
    refuse_exchanged(folder, stored)
    model = build_model(without_checkpoint(config))
    try:
        model.load_state_dict(stored.weights)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the model of {folder / 'config.yaml'}: {error}") from None
    return config, model, stored.step


def read_run_config(folder: str | Path) -> RunConfig:
    """The resolved configuration of a run folder (ValueError when it is none)."""
    path = Path(folder) / "config.yaml"
    if not path.is_file():
        raise ValueError(f"{folder} is not a run folder: it has no config.yaml")
    return config_from_dict(parse_yaml(path.read_text(encoding="utf-8"), str(path)))


def read_categories(folder: str | Path) -> list[dict[str, Any]]:
    """Ids and names of the classes of a detector's run folder, in order of the classes (ValueError when it is none)."""
    path = Path(folder) / CATEGORIES
    if not path.is_file():
        raise ValueError(f"{folder} has no {CATEGORIES}: it is not a run of a detector")
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found
