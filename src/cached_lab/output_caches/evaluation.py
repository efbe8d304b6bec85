"""Score a trained language model with an output cache whose settings the validation split chooses.

One pass over the validation split scores a grid of settings; the best one is scored on the requested split. The shares
include 0, so a cache that does not help is left out. Options that the user gives are not tuned. The datastore of kNN-LM
is built from the training split and kept with cached data.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from cached_lab.data.text import TextDataset
from cached_lab.experiments.build import build_dataset
from cached_lab.experiments.load import load_run
from cached_lab.tasks.kinds import task_name
from cached_lab.training.config import RunConfig
from cached_lab.training.distributed import World, in_world
from cached_lab.yaml_tree import apply_override
from cached_transformers.annotations import check_type
from cached_transformers.registry import unknown_name

from .knn_lm import KNNLM, Datastore
from .neural_cache import NeuralCache
from .output_cache import OutputCache
from .scoring import build_datastore, cache_losses

GRIDS: dict[str, tuple[float, ...]] = {
    "theta": (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
    "temperature": (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0),
    "lambda_": (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
}
"""Values to try of options that the user does not give; products of normed hidden states grow with their width."""
OPTIONS: dict[str, dict[str, tuple[Any, Any]]] = {
    "neural": {"size": (2000, int), "theta": (None, float | None), "lambda_": (None, float | None)},
    "knn": {
        "k": (1024, int),
        "temperature": (None, float | None),
        "lambda_": (None, float | None),
        "key": ("feed_forward", Literal["feed_forward", "last_hidden"]),
        "dtype": ("float16", Literal["float16", "float32"]),
    },
}
"""Default and type of the options of `NeuralCache`, and of `KNNLM` and its datastore."""


def cache_options(name: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The options of a cache from words `NAME.option=value`; None is tuned.

    Raises:
        ValueError: an unknown cache or option, an option of another cache, or an invalid value.
    """
    if name not in OPTIONS:
        raise ValueError(unknown_name("output cache", name, list(OPTIONS)))
    tree: dict[str, Any] = {name: {}}
    for override in overrides:
        begin = override.partition("=")[0].partition(".")[0]
        if begin != name:
            raise ValueError(f"{override!r} sets an option of {begin!r}, but the output cache is {name!r}; drop it")
        apply_override(tree, override)
    if not isinstance(tree[name], dict):
        raise ValueError(f"{name}={tree[name]!r} sets no option; write {name}.option=value")
    values = {option: default for option, (default, _) in OPTIONS[name].items()}
    for option, value in tree[name].items():
        field = "lambda_" if option == "lambda" else option
        if field not in values:
            raise ValueError(unknown_name(f"option of the output cache {name!r}", option, [_shown(f) for f in values]))
        values[field] = check_type(f"{name}.{option}", value, OPTIONS[name][field][1])
    _make(name, values, Datastore(torch.zeros(1, 1), torch.zeros(1)))  # checks the values
    return values


def _make(name: str, values: Mapping[str, Any], store: Datastore | None) -> OutputCache:
    """The cache, with its own defaults for tuned options."""
    names = ("size", "theta") if name == "neural" else ("k", "temperature")
    given = {option: values[option] for option in (*names, "lambda_") if values[option] is not None}
    if name == "neural":
        return NeuralCache(**given)
    assert store is not None
    return KNNLM(store, **given)


def evaluate_output_cache(
    folder: Path, config: RunConfig, checkpoint: str, split: str, name: str, options: Mapping[str, Any], device: str
) -> dict[str, Any]:
    """Score a split without and with the cache `name` ("neural" or "knn").

    Returns:
        "split"; "step" of the weights; "scores", rows of {"output_cache": "none" or the name, score: value}; and
        "output_cache": {"name", "options", "tuned": options that validation chose, "at_end": tuned options with the
        first or last value of their grid, "validation": {"without", "with"} losses, where something was tuned,
        "entries" of a datastore, "seconds": {"store", "tune", "score"}}.

    Raises:
        ValueError: the run is no language model; the training split with kNN-LM.
    """

    def work(world: World) -> dict[str, Any]:
        dataset = build_dataset(config, split)
        if task_name(dataset) != "language":
            kind = f"changes the predictions of a language model, and {folder} was trained on {dataset.name!r}"
            raise ValueError(f"--output-cache {name} {kind}; leave it out")
        if name == "knn" and split == "train":
            raise ValueError("--split train: the datastore holds these tokens, and each would find itself")
        _, model, step = load_run(folder, checkpoint)
        model.to(world.device)
        tuned = [option for option in GRIDS if options.get(option, option) is None]
        clock, store = [time.perf_counter()], None
        if name == "knn":
            train = build_dataset(config, "train")
            store = build_datastore(model, train, world, config, options["key"], options["dtype"])
        cache = _make(name, options, store)
        clock.append(time.perf_counter())
        about: dict[str, Any] = {"name": name, "tuned": [_shown(option) for option in tuned]}
        if tuned:
            validation = dataset if split == "validation" else build_dataset(config, "validation")
            cache, about["validation"] = _tune(model, validation, world, config, cache, tuned)
            found = {option: getattr(cache, option) for option in tuned}
            # Better values may lie outside the grid, but not below 0.
            about["at_end"] = [_shown(o) for o, v in found.items() if v in (GRIDS[o][0], GRIDS[o][-1]) and v != 0]
        clock.append(time.perf_counter())
        nats, tokens = cache_losses(model, dataset, world, config, [cache])
        clock.append(time.perf_counter())
        about["options"] = {_shown(option): getattr(cache, option, value) for option, value in options.items()}
        about |= {} if store is None else {"entries": len(store)}
        about["seconds"] = dict(zip(("store", "tune", "score"), np.diff(clock).tolist(), strict=True))
        losses = zip(("none", name), nats.tolist(), strict=True)
        rows = [{"output_cache": label, **dataset.scores(loss, tokens)} for label, loss in losses]
        return {"split": split, "step": step, "scores": rows, "output_cache": about}

    return in_world(device, work)


def _tune(
    model: nn.Module,
    dataset: TextDataset,
    world: World,
    config: RunConfig,
    cache: OutputCache,
    names: Sequence[str],
) -> tuple[OutputCache, dict[str, float]]:
    """The best cache of the grid, the first of equals; and the losses of validation."""
    grid = [dict(zip(names, values, strict=True)) for values in product(*(GRIDS[name] for name in names))]
    settings = [dataclasses.replace(cache, **values) for values in grid]  # type: ignore[type-var]
    nats, tokens = cache_losses(model, dataset, world, config, settings)
    best = int(nats[1:].nan_to_num(torch.inf).argmin())
    return settings[best], {"without": float(nats[0]) / tokens, "with": float(nats[1 + best]) / tokens}


def _shown(option: str) -> str:
    """An option's name on the command line: `lambda` for Python's `lambda_`."""
    return option.rstrip("_")
