"""Score a trained language model with an output cache whose settings the validation split chooses.

One pass over the validation split scores a grid of settings; the best one is scored on the requested split. The shares
include 0, so a cache that does not help is left out. Options that the user gives are not tuned. The datastore of kNN-LM
is built from the training split and kept in the run folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
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
from cached_lab.tasks.language.scores import segment_length
from cached_lab.training.config import RunConfig
from cached_lab.training.distributed import World, in_world
from cached_lab.yaml_tree import apply_override
from cached_transformers.annotations import check_type
from cached_transformers.registry import unknown_name
from cached_transformers.state.fingerprint import fingerprint

from .datastore import Datastore, load
from .knn_lm import KNNLM
from .neural_cache import NeuralCache
from .output_cache import OutputCache
from .scoring import build_datastore, cache_losses

GRIDS: dict[str, tuple[float, ...]] = {
    "theta": (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
    "temperature": (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0),
    "lambda_": (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    "alpha": (float("-inf"), -100.0, -50.0, -30.0, -20.0, -15.0, -10.0, -8.0, -6.0, -4.0, -2.0, 0.0, 2.0, 4.0),
}
"""Values to try of options that the user does not give; products of normed hidden states grow with their width."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "neural": {"size": 2000, "theta": None, "lambda_": None, "form": "linear", "alpha": None},
    "knn": {
        "k": 1024,
        "temperature": None,
        "lambda_": None,
        "key": "feed_forward",
        "dtype": "float16",
        "search": "exact",
        "probes": 32,
        "folder": None,
    },
}
"""Options of `NeuralCache`, and of `KNNLM` and its `Datastore`; `folder` is RUN/datastore when None."""
HINTS: dict[str, Any] = {
    **dict.fromkeys(("size", "k", "probes"), int),
    **dict.fromkeys(GRIDS, float | None),
    "search": str,
    "folder": str | None,
    "form": Literal["linear", "joint"],
    "key": Literal["feed_forward", "last_hidden"],
    "dtype": Literal["float16", "float32"],
}


@dataclass(frozen=True)
class CacheOptions:
    """Options of the output cache `name` ("neural" or "knn"); None is tuned."""

    name: str
    values: dict[str, Any]

    def tuned(self) -> list[str]:
        """Options that the validation split chooses."""
        return [name for name in GRIDS if self.values.get(name, name) is None]

    def cache(self, store: Datastore | None = None) -> OutputCache:
        """The cache, with its own defaults for tuned options."""
        kind = NeuralCache if self.name == "neural" else KNNLM
        known = {field.name for field in dataclasses.fields(kind)}
        given = {name: value for name, value in self.values.items() if name in known and value is not None}
        return NeuralCache(**given) if store is None else KNNLM(store, **given)


def cache_options(name: str, overrides: Sequence[str]) -> CacheOptions:
    """Parse the options of a cache from words `NAME.option=value`.

    Raises:
        ValueError: an unknown cache or option, an option of another cache, or an invalid value.
    """
    if name not in DEFAULTS:
        raise ValueError(unknown_name("output cache", name, list(DEFAULTS)))
    tree: dict[str, Any] = {name: {}}
    for override in overrides:
        begin = override.partition("=")[0].partition(".")[0]
        if begin != name:
            raise ValueError(f"{override!r} sets an option of {begin!r}, but the output cache is {name!r}; drop it")
        apply_override(tree, override)
    if not isinstance(tree[name], dict):
        raise ValueError(f"{name}={tree[name]!r} sets no option; write {name}.option=value")
    values = dict(DEFAULTS[name])
    for option, value in tree[name].items():
        field = "lambda_" if option == "lambda" else option
        if field not in values:
            raise ValueError(unknown_name(f"option of the output cache {name!r}", option, [_shown(f) for f in values]))
        values[field] = check_type(f"{name}.{option}", value, HINTS[field])
    if name == "neural":
        unused, other = ("alpha", "joint") if values["form"] == "linear" else ("lambda_", "linear")
        if (value := values.pop(unused)) is not None:
            raise ValueError(f"neural.{_shown(unused)}={value} is of neural.form={other}; leave it out")
    options = CacheOptions(name, values)
    trial = torch.zeros(1, 1), torch.zeros(1), None
    options.cache(Datastore(*trial, values["search"], values["probes"]) if name == "knn" else None)  # checks the values
    return options


def evaluate_output_cache(
    folder: Path, config: RunConfig, checkpoint: str, split: str, options: CacheOptions, device: str
) -> dict[str, Any]:
    """Score a split without and with a cache.

    Returns:
        "split"; "step" of the weights; "scores", rows of {"output_cache": "none" or the name, score: value}; and
        "output_cache": {"name", "options", "tuned": options that validation chose, "at_end": tuned options with the
        first or last value of their grid, "validation": {"without", "with"} losses, where something was tuned,
        "entries" of a datastore, "seconds": {"store", "tune", "score"}}.

    Raises:
        ValueError: the run is no language model; the datastore is of another model; the training split with kNN-LM.
    """

    def work(processes: World) -> dict[str, Any]:
        return _evaluate(folder, config, checkpoint, split, options, processes)

    return in_world(device, work)


def _evaluate(
    folder: Path, config: RunConfig, checkpoint: str, split: str, options: CacheOptions, processes: World
) -> dict[str, Any]:
    name, tuned = options.name, options.tuned()
    dataset = build_dataset(config, split)
    if task_name(dataset) != "language":
        what = f"changes the predictions of a language model, and {folder} was trained on {dataset.name!r}"
        raise ValueError(f"--output-cache {name} {what}; leave it out")
    if name == "knn" and split == "train":
        raise ValueError("--split train: the datastore holds these tokens, and each would find itself")
    _, model, step = load_run(folder, checkpoint)
    model.to(processes.device)
    clock, seconds = time.perf_counter, {}
    begin = clock()
    store = _datastore(folder, config, model, options.values, processes) if name == "knn" else None
    cache = options.cache(store)
    seconds["store"] = clock() - begin
    about: dict[str, Any] = {"name": name, "tuned": [_shown(option) for option in tuned]}
    if tuned:
        begin = clock()
        validation = dataset if split == "validation" else build_dataset(config, "validation")
        cache, about["validation"] = _tune(model, validation, processes, config, cache, tuned)
        seconds["tune"] = clock() - begin
        found = {option: getattr(cache, option) for option in tuned}
        about["at_end"] = [_shown(option) for option, value in found.items() if _at_end(option, value)]
    begin = clock()
    nats, tokens = cache_losses(model, dataset, processes, config, [cache])
    seconds["score"] = clock() - begin
    used = {option: getattr(cache, option, value) for option, value in options.values.items()}
    about["options"] = {_shown(option): value for option, value in used.items()}
    if store is not None:
        about["entries"] = len(store)
    rows = [
        {"output_cache": label, **dataset.scores(loss, tokens)}
        for label, loss in zip(("none", name), nats.tolist(), strict=True)
    ]
    return {"split": split, "step": step, "scores": rows, "output_cache": {**about, "seconds": seconds}}


def _tune(
    model: nn.Module,
    dataset: TextDataset,
    processes: World,
    config: RunConfig,
    cache: OutputCache,
    names: Sequence[str],
) -> tuple[OutputCache, dict[str, float]]:
    """The best cache of the grid, the first of equals; and the losses of validation."""
    settings = [
        dataclasses.replace(cache, **dict(zip(names, values, strict=True)))  # type: ignore[type-var]
        for values in product(*(GRIDS[name] for name in names))
    ]
    nats, tokens = cache_losses(model, dataset, processes, config, settings)
    best = int(nats[1:].nan_to_num(torch.inf).argmin())
    return settings[best], {"without": float(nats[0]) / tokens, "with": float(nats[1 + best]) / tokens}


def _at_end(option: str, value: float) -> bool:
    """Return whether better values may lie outside the grid: not below 0 or minus infinity."""
    return value in (GRIDS[option][0], GRIDS[option][-1]) and value not in (0.0, float("-inf"))


def _datastore(
    folder: Path, config: RunConfig, model: nn.Module, values: dict[str, Any], processes: World
) -> Datastore:
    """The datastore of the run, built if it does not exist."""
    path = folder / "datastore" if values["folder"] is None else Path(values["folder"])
    train = build_dataset(config, "train")
    text = hashlib.sha256()
    for array in (train.tokens, train.starts):
        text.update(np.ascontiguousarray(array).view(np.uint8).data)
    about = {
        "fingerprint": fingerprint(model),
        "text": text.hexdigest(),
        "segment_length": segment_length(config),
        "key": values["key"],
        "dtype": values["dtype"],
    }
    if not path.exists() and processes.main:
        build_datastore(path, model, train, processes.device, config, about)
    processes.barrier()
    return load(path, about, values["search"], values["probes"])


def _shown(option: str) -> str:
    """An option's name on the command line: `lambda` for Python's `lambda_`."""
    return option.rstrip("_")
