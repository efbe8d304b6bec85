"""Drill: a run is interrupted after any step by a signal, or in the next one by an error, and resumed.

A case `listops/SIGTERM/3/17` is a recipe, the kind of interruption, its step, and a seed of the settings: averages,
saves in the background, steps between saves and evaluations, checkpoints to keep, and a second interruption.
"""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from data import streaming_library
from data.pictures import class_folders, write_files

from cached_lab.tasks.recipes import config_from_dict
from cached_lab.training.config import RunConfig, config_to_dict
from cached_lab.training.interruption import Interrupted, RunFailed
from cached_lab.training.trainer import Trainer

from . import _commands, _runs
from .frame import Failure

HOW = ("SIGTERM", "SIGINT", "error")
KINDS = ("listops", "documents", "language", "images", "streams", "denoising", "translation", "detection")
"""Recipes, the cheapest first; a sample takes the first three."""


def cases(count: int, seed: int) -> Iterator[str]:
    """Recipes in turn, each with all kinds and steps of an interruption in random order."""
    chance = random.Random(seed)
    kinds = [kind for kind in KINDS[: max(3, count // 4)] if kind != "detection" or kind in _runs.recipes()]
    moments = [(how, step) for how in HOW for step in range(1, _runs.STEPS)]
    orders = {kind: chance.sample(moments, len(moments)) for kind in kinds}
    for number in range(min(count, len(kinds) * len(moments))):
        kind = kinds[number % len(kinds)]
        how, step = orders[kind][number // len(kinds)]
        yield f"{kind}/{how}/{step}/{chance.randrange(1000)}"


def prepare(shared: Path) -> None:
    _commands.prepare(shared)
    streaming_library.write_shards(shared / "data" / "shards", {"train": 9, "validation": 6})
    write_files(shared / "data" / "images", class_folders(classes=3, images=20))
    library = ModuleType("datasets")
    library.load_dataset = streaming_library.load_dataset  # type: ignore[attr-defined]
    sys.modules["datasets"] = library


def _config(kind: str, chance: random.Random) -> RunConfig:
    """A tiny recipe of a kind, with random settings of its batches, saves and averages."""
    data, recipes = _commands.data(), _runs.recipes()
    alike = {"streams": "language", "documents": "listops", "denoising": "translation"}
    tree: dict[str, Any] = config_to_dict(recipes[alike.get(kind, kind)](data))
    options, model, training = tree["data"], tree["model"], tree["training"]
    training["accumulate"] = chance.randint(1, 2) if kind != "detection" else 1
    if kind == "streams":
        options = {"name": "huggingface_stream", "dataset": str(data / "shards"), "tokenizer": "byte", "window": 5}
        training["test"] = "none"
    elif kind == "language":
        options["reset"] = chance.choice(["never", "document", "packed"])
        options["shuffle"] = options["reset"] == "document"
        model["memory"] = chance.choice([model["memory"], {"name": "rmt", "length": 2}])
        training |= {"reset_rows": 0.3, "bptt": 2, "evaluation_batch_size": 8}
        if options["reset"] == "never":
            training |= {"reset_rows": 0.0, "segments": 3, "bptt_window": "sliding", "recall": 0.2, "accumulate": 1}
    elif kind == "documents":
        sizes = {"train_size": 24, "validation_size": 12, "test_size": 12}
        options = {"name": "planted_documents", "segment_length": 8, "segments": 3, "noise": 4, **sizes}
        model |= {"positions": "rotary", "memory": {"name": "rmt", "length": 2}}
        training |= chance.choice([{}, {"curriculum": [1, 2, 3], "solved": 0.02}])
    elif kind == "denoising":
        options = {"name": "denoising", "path": str(data / "text"), "max_length": 16, "vocabulary_size": 280}
        training["batch_tokens"] = None
    elif kind == "images" and find_spec("timm"):
        augmentation = {"auto_augment": "rand-m9-mstd0.5-inc1", "erase": 0.25}
        options = {"name": "image_folder", "path": str(data / "images"), "image_size": 8, "augmentation": augmentation}
        training |= {"mixup": 0.8, "cutmix": 1.0, "repeats": 2, "label_smoothing": 0.1, "batch_size": 8}
    every = chance.randint(1, 3) if kind != "detection" else 1
    training |= {"save": chance.choice(["sync", "async"]), "evaluate_every": every, "log_every": chance.randint(1, 3)}
    training |= {"save_every": chance.choice([None, 1, every]), "keep": chance.randint(2, 3)}
    average = chance.choice([{}, {"ema_decay": 0.5}, {"average_last": 2}])
    training |= {"ema_decay": None, "average_last": 1, **average}
    return config_from_dict(tree | {"data": options})


def attempt(case: str, folder: Path) -> None:
    kind, how, step, _ = case.split("/")
    chance = random.Random(case)
    config = _config(kind, chance)
    last = config.training.steps
    at = min(int(step), last - 1)
    later = chance.choice([None, *range(at + 1, last)])
    _train(config, folder / "whole")
    for strike in filter(None, (at, later)):
        _train(config, folder / "run", how, strike)
    _train(config, folder / "run")
    try:
        _runs.compare_runs(folder / "run", folder / "whole")
    except Failure as failure:
        raise Failure(f"{how} after step {at}, then {later}; {config}: {failure}") from None


def _train(config: RunConfig, run: Path, how: str = "", step: int = 0) -> None:
    """Train, interrupted after a step (0: never)."""
    original = Trainer._train_step

    def struck(trainer: Trainer, *arguments: Any) -> None:
        if how == "error" and trainer.step == step:
            backward = trainer.task.backward
            trainer.task.backward = lambda *batch: failed(backward(*batch))  # type: ignore[method-assign]
        original(trainer, *arguments)
        if how != "error" and trainer.step == step:
            signal.raise_signal(signal.Signals[how])

    def failed(_: Any) -> Any:
        raise RunFailed("made")

    Trainer._train_step = struck  # type: ignore[method-assign]
    try:
        _runs.train(config, run)
        if step:
            raise Failure(f"expected an interruption after step {step}, found none")
    except (Interrupted, RunFailed) as stop:
        if (str(stop) != "made" and how not in str(stop)) or not step:
            raise
    finally:
        Trainer._train_step = original  # type: ignore[method-assign]


SUMMARY = (
    "runs of every kind of task are interrupted after any step by SIGTERM or SIGINT, or inside the next by an "
    "error, once or twice, and resumed: weights, caches, metrics, best, "
    "last, averages, scores and folders are those of the undisturbed run"
)
COUNT, SAMPLE = 90, 3
