"""Scores of a comparison's cached runs with their caches taken away, destroyed, exchanged or made anew."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from cached_transformers.experiments.build import build_dataset
from cached_transformers.experiments.load import load_run
from cached_transformers.experiments.variants import Variant
from cached_transformers.memories import memory_spec
from cached_transformers.registry import MEMORIES
from cached_transformers.training.config import config_hash
from cached_transformers.training.distributed import World, in_world
from cached_transformers.training.run_files import json_text, write_whole

from .scores import modes_of, score_cache_use, scores_path


def has_shared_cache(variant: Variant) -> bool:
    """Whether the variant's memory is a cache that all rows share."""
    spec = memory_spec(variant.config.model.get("memory"))
    return spec is not None and getattr(MEMORIES.entry(spec[0]).factory, "shared", False) is True


def score_run(folder: Path, variant: Variant, seed: int, other: tuple[Path, int] | None, split: str) -> bool:
    """Write the scores of one finished run into its folder, unless they are there; returns whether they were not.

    Args:
        other: folder and seed of the run whose caches are tried in this one.
    """
    config = variant.seeded(seed)
    checkpoint = "last" if config.training.test == "last" else "best"
    settings = {"config": config_hash(config), "checkpoint": checkpoint, "split": split}
    settings |= {"other": "none" if other is None else f"seed {other[1]}"}
    path = scores_path(folder)
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
        return score_cache_use(
            load, build_dataset(config, split), modes, world, size, seed, theirs, config.training.workers
        )

    content = {**settings, "scores": in_world(config.training.device, scores)}
    write_whole(path, json_text(content))
    return True


def score_variant(
    variant: Variant, seeds: Sequence[int], folder_of: Callable[[int], Path], split: str, console: Console
) -> dict[str, list[dict[str, Any]]]:
    """Scores by mode, in order of the seeds, of all runs of a variant; what is missing is measured."""
    by_mode: dict[str, list[dict[str, Any]]] = {}
    for index, seed in enumerate(seeds):
        following = seeds[(index + 1) % len(seeds)]
        other = None if following == seed else (folder_of(following), following)
        if score_run(folder_of(seed), variant, seed, other, split):
            console.print(f"{variant.name}, seed {seed}: scored by use of the cache", markup=False)
        content = json.loads(scores_path(folder_of(seed)).read_text(encoding="utf-8"))
        for row in content["scores"]:
            by_mode.setdefault(row["mode"], []).append(row)
    return by_mode
