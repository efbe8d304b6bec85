"""Use of a shared cache by a trained model: scores with the cache emptied, permuted, exchanged, or updated per batch.

A cache that is the same for all rows and constant in evaluation may be no more than additional weights
(arXiv:2312.12742 does not test this). Each mode treats the cache of the same trained weights differently:

    carry    as after training
    reset    zeros
    shuffle  its entries permuted, so that values stay and positions are lost
    other    the caches of another run of the same model, trained from another seed
    batch N  each batch of N rows reads its own update, as in training; nothing is stored

`batch N` at the batch size of training is the difference of training and evaluation in the cache (dropout stays off);
over N it shows the dependence on the rest of the batch. It exists for caches whose batch mean is read by all rows.
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
from cached_lab.training.config import config_hash
from cached_lab.training.distributed import World, in_world
from cached_transformers.files import json_text, write_whole
from cached_transformers.memories import memory_specs
from cached_transformers.memories.grc.shared_cache import caches, hold_caches, reset_caches, shuffle_caches
from cached_transformers.memories.grc.shared_cache_memory import SharedCacheMemory
from cached_transformers.registry import MEMORIES

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
    """Return the modes for the caches of a model; none for a model without caches.

    Args:
        batch_size: of training. other: another run has caches to take.
    """
    found = list(caches(model))
    if not found:
        return []
    sizes = sorted({*BATCHES, batch_size}) if all(cache.attend == "mean" for cache in found) else []
    batches = [f"batch {n}" for n in sizes]
    return ["carry", "reset", "shuffle", *(["other"] if other else []), *batches]


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
        scored, size, inside = dataset, batch_size, contextlib.nullcontext
        if mode == "reset":
            reset_caches(model)
        elif mode == "shuffle":
            shuffle_caches(model, torch.Generator().manual_seed(seed))
        elif mode == "other":
            assert other is not None
            take_caches(model, other.to(world.device))
        elif mode.startswith("batch "):
            scored, size = ShuffledDataset(dataset), int(mode.split()[1])
            inside = caches_updated_by_the_batch  # type: ignore[assignment]
        rows.append({"mode": mode, **evaluate(model, scored, world, size, workers, inside)})
    return rows


def has_shared_cache(variant: Variant) -> bool:
    """Return whether a memory of the variant is a cache that all rows share."""
    names = [name for name, _ in memory_specs(variant.config.model.get("memory"))]
    return any(getattr(MEMORIES.entry(name).factory, "shared", False) is True for name in names)


def score_run(folder: Path, variant: Variant, seed: int, other: tuple[Path, int] | None, split: str) -> bool:
    """Write the scores of a finished run into its folder; return False if they were there already.

    Args:
        other: folder and seed of the run whose caches `other` takes.
    """
    config = variant.seeded(seed)
    checkpoint = "last" if config.training.test == "last" else "best"
    settings = {"config": config_hash(config), "checkpoint": checkpoint, "split": split}
    settings |= {"other": "none" if other is None else f"seed {other[1]}"}
    path = folder / FILE_NAME
    if path.is_file():
        stored = json.loads(path.read_text(encoding="utf-8"))
        if all(stored.get(key) == value for key, value in settings.items()):
            return False

    def load(run: Path = folder) -> nn.Module:
        return load_run(run, checkpoint)[1]

    def scores(world: World) -> list[dict[str, Any]]:
        theirs = None if other is None else load(other[0])
        size = config.training.evaluation_batch_size or config.training.batch_size
        modes = modes_of(load(), config.training.batch_size, other is not None)
        data = build_dataset(config, split)
        return score_cache_use(load, data, modes, world, size, seed, theirs, config.training.workers)

    content = {**settings, "scores": in_world(config.training.device, scores)}
    write_whole(path, json_text(content))
    return True


def score_variant(
    variant: Variant, seeds: Sequence[int], folder_of: Callable[[int], Path], split: str, console: Console
) -> dict[str, list[dict[str, Any]]]:
    """Return scores by mode, in order of the seeds, of all runs of a variant; missing ones are measured."""
    by_mode: dict[str, list[dict[str, Any]]] = {}
    for index, seed in enumerate(seeds):
        following = seeds[(index + 1) % len(seeds)]
        other = None if following == seed else (folder_of(following), following)
        if score_run(folder_of(seed), variant, seed, other, split):
            console.print(f"{variant.name}, seed {seed}: scored by use of the cache", markup=False)
        content = json.loads((folder_of(seed) / FILE_NAME).read_text(encoding="utf-8"))
        for row in content["scores"]:
            by_mode.setdefault(row["mode"], []).append(row)
    return by_mode
