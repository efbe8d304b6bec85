"""Use of a shared cache by a trained model: scores with the cache emptied, permuted, exchanged, or updated per batch.

A cache that is the same for all rows and constant in evaluation may be no more than additional weights
(arXiv:2312.12742 does not test this). Each mode treats the cache of the same trained weights differently:

    carry    as after training
    reset    zeros
    shuffle  its entries permuted, so that values stay and positions are lost
    other    the caches of another run of the same model, trained from another seed
    batch N  each batch of N rows reads its own update, as in training; nothing is stored (only if all rows read the
             batch's mean). At the batch size of training it is the difference of training and evaluation in the cache.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from cached_lab.tasks.classification.scores import evaluate
from cached_lab.training.config import RunConfig, config_hash
from cached_lab.training.distributed import World, in_world
from cached_transformers.files import json_text, write_whole
from cached_transformers.memories.grc.shared_cache import caches, hold_caches, reset_caches, shuffle_caches
from cached_transformers.memories.grc.shared_cache_memory import SharedCacheMemory

from .build import build_dataset
from .load import load_run
from .variants import Variant

FILE_NAME = "cache_use.json"
BATCHES = (4, 256)
"""Batch sizes of `batch N`, beside that of training."""


@contextlib.contextmanager
def caches_updated_by_the_batch(model: nn.Module) -> Iterator[None]:
    """Read caches in evaluation as in training, updated by the current rows; nothing is stored."""
    layers = [module for module in model.modules() if isinstance(module, SharedCacheMemory)]
    before = [(layer.training, layer.cache.training, layer._folded) for layer in layers]
    with hold_caches(model):
        for layer in layers:  # not their children: dropout in the branches stays off
            layer.training = layer.cache.training = True
            layer._folded = None
        try:
            yield
        finally:
            for layer, (attention, cache, folded) in zip(layers, before, strict=True):
                layer.training, layer.cache.training, layer._folded = attention, cache, folded


def treat_memory(model: nn.Module, mode: str, seed: int) -> None:
    """Empty or shuffle the caches of a model, in place; leave them in other modes."""
    if mode == "reset":
        reset_caches(model)
    elif mode == "shuffle":
        shuffle_caches(model, torch.Generator().manual_seed(seed))


@torch.no_grad()
def take_caches(model: nn.Module, other: nn.Module) -> None:
    """Copy the caches of another model of the same architecture into this one.

    Raises:
        ValueError: their caches differ in number or size.
    """
    mine, theirs = list(caches(model)), list(caches(other))
    sizes = [[tuple(cache.cache_MC.shape) for cache in side] for side in (mine, theirs)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"the other run's caches are of {sizes[1]} (slots, channels), this run's of {sizes[0]}")
    for cache, source in zip(mine, theirs, strict=True):
        source.commit()
        cache.reset_cache()
        cache.cache_MC.copy_(source.cache_MC)


class ShuffledDataset:
    """A data set in random order, so that rows of a class do not follow each other."""

    def __init__(self, dataset: Any, seed: int = 0) -> None:
        self.dataset, self.collate, self.classes = dataset, dataset.collate, dataset.classes
        self.split, self.bad_files = getattr(dataset, "split", ""), getattr(dataset, "bad_files", "stop")
        self.order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed)).tolist()

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.order[index]]


def modes_of(model: nn.Module, batch_size: int, other: bool) -> list[str]:
    """Return the modes for the caches of a model: `batch N` also at the batch size of training, `other` if given."""
    sizes = sorted({*BATCHES, batch_size}) if all(cache.attend == "mean" for cache in caches(model)) else []
    return ["carry", "reset", "shuffle", *(["other"] if other else []), *(f"batch {n}" for n in sizes)]


def score_cache_use(
    load: Callable[[], nn.Module],
    dataset: Any,
    modes: Sequence[str],
    world: World,
    batch_size: int,
    seed: int,
    other: nn.Module | None = None,
    workers: int = 0,
) -> list[dict[str, Any]]:
    """Return scores {"mode", "loss", "accuracy"} of a model for each mode.

    Args:
        load: loads the trained model at each call.
        batch_size: evaluation batch of all modes but `batch N`.
        seed: of the permutation. other: the model whose caches `other` takes. workers: processes that load data.
    """
    rows = []
    for mode in modes:
        model = load().to(world.device)
        scored: tuple[Any, ...] = (dataset, world, batch_size, workers)
        treat_memory(model, mode, seed)
        if mode == "other" and other is not None:
            take_caches(model, other.to(world.device))
        elif mode.startswith("batch "):
            size = int(mode.split()[1])
            scored = (ShuffledDataset(dataset), world, size, workers, caches_updated_by_the_batch)
        rows.append({"mode": mode, **evaluate(model, *scored)})
    return rows


def score_variant(
    variant: Variant, seeds: Sequence[int], folder: Path, split: str, console: Console
) -> dict[str, list[dict[str, Any]]]:
    """Return scores by mode, in order of the seeds, of all runs of a variant; missing ones are measured.

    The scores of a run are kept in its folder. Mode `other` takes the caches of the next seed's run.
    """
    by_mode: dict[str, list[dict[str, Any]]] = {}
    for index, seed in enumerate(seeds):
        following = seeds[(index + 1) % len(seeds)]
        run, config = folder / variant.run_name(seed), variant.seeded(seed)
        path = run / FILE_NAME
        checkpoint = "last" if config.training.test == "last" else "best"
        settings = {"config": config_hash(config), "checkpoint": checkpoint, "split": split}
        settings |= {"other": "none" if following == seed else f"seed {following}"}
        stored = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if any(stored.get(key) != value for key, value in settings.items()):
            other = None if following == seed else folder / variant.run_name(following)
            stored = settings | {"scores": _scores(config, run, checkpoint, split, other)}
            write_whole(path, json_text(stored))
            console.print(f"{variant.name}, seed {seed}: scored by use of the cache", markup=False)
        for row in stored["scores"]:
            by_mode.setdefault(row["mode"], []).append(row)
    return by_mode


def _scores(config: RunConfig, run: Path, checkpoint: str, split: str, other: Path | None) -> list[dict[str, Any]]:
    def scores(world: World) -> list[dict[str, Any]]:
        def load(folder: Path = run) -> nn.Module:
            return load_run(folder, checkpoint)[1]

        theirs = None if other is None else load(other)
        settings = config.training
        size = settings.evaluation_batch_size or settings.batch_size
        modes = modes_of(load(), settings.batch_size, other is not None)
        data = build_dataset(config, split)
        return score_cache_use(load, data, modes, world, size, settings.seed, theirs, settings.workers)

    return in_world(config.training.device, scores)
