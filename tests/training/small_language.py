"""A small language model over random words, and its trainer, for the tests of text."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import nn

from cached_lab.experiments.build import build_dataset, build_model
from cached_lab.tasks.kinds import make_task
from cached_lab.tasks.recipes import config_from_dict, fill_from_data
from cached_lab.training.config import RunConfig
from cached_lab.training.distributed import World
from cached_lab.training.progress import Reporter
from cached_lab.training.trainer import Trainer
from cached_lab.yaml_tree import apply_override

CPU = World(torch.device("cpu"))
STEPS = 12


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHED_TRANSFORMERS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(name="text")
def made_text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text")


def write_text(folder: Path) -> Path:
    """A folder of three files of made-up words."""
    generator = random.Random(0)
    folder.mkdir()
    words = ["".join(generator.choices("abcdefgh", k=generator.randint(1, 5))) for _ in range(30)]
    for name, size in {"train": 700, "valid": 90, "test": 120}.items():
        lines = [" ".join(generator.choices(words, k=6)) for _ in range(size // 6)]
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def recipe(text: Path, *overrides: str) -> dict:
    """A recipe for a small model over the text, with overrides `key=value`."""
    tree = {
        "name": "language",
        "data": {"name": "text", "path": str(text), "tokenizer": "byte"},
        "model": {
            "name": "language_model",
            **{"width": 16, "depth": 2, "heads": 2, "feed_forward": 16, "dropout": 0.1},
            "memory": {"name": "transformer_xl", "length": 6},
        },
        "training": {
            **{"steps": STEPS, "batch_size": 4, "segment_length": 8, "segments": 2, "metric": "bits_per_byte"},
            **{"evaluate_every": 4, "log_every": 3, "tensorboard": False, "device": "cpu"},
        },
        "optimizer": {"learning_rate": 0.01},
        "schedule": {"name": "constant"},
    }
    for override in overrides:
        apply_override(tree, override)
    return tree


def trainer_of(config: RunConfig, folder: Path, world: World = CPU, model: nn.Module | None = None) -> Trainer:
    """A trainer of a configuration, which has not begun."""
    train, validation = (build_dataset(config, split) for split in ("train", "validation"))
    config = fill_from_data(config, train.describe())
    if world.main:
        folder.mkdir(parents=True, exist_ok=True)
    world.barrier()
    task = make_task(config, build_model(config) if model is None else model, train, validation, world)
    return Trainer(config, task, folder, world, Reporter("test", config.training.steps, None))


def make(folder: Path, text: Path, *overrides: str, world: World = CPU) -> Trainer:
    """A trainer of the recipe, which has not begun."""
    return trainer_of(config_from_dict(recipe(text, *overrides)), folder, world)


def fitted(folder: Path, text: Path, *overrides: str, world: World = CPU) -> Trainer:
    """A trainer that went on from the checkpoints in its folder, to the end."""
    trainer = make(folder, text, *overrides, world=world)
    trainer.resume("auto")
    trainer.fit()
    return trainer
