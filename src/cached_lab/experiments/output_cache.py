"""A trained language model scored with a cache over its outputs, whose settings the validation split chooses.

Of a grid of settings the validation split is scored with all in one reading; the best one is then scored on the split
that was asked for. 0 is among the shares, so a cache that does not help is left out. What the user gives is not tuned.

The datastore of kNN-LM is made of the training split and kept in the run folder; another model's, or that of another
text or other segments, is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
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
from cached_lab.tasks.language.output_caches import build_datastore, cache_losses
from cached_lab.tasks.language.scores import segment_length
from cached_lab.training.config import RunConfig
from cached_lab.training.distributed import World, in_world
from cached_lab.yaml_tree import apply_override
from cached_transformers.annotations import check_type, hints_of
from cached_transformers.models.output_caches import KNNLM, Datastore, NeuralCache, OutputCache
from cached_transformers.models.output_caches.datastore import load
from cached_transformers.registry import unknown_name
from cached_transformers.state.fingerprint import fingerprint

SHARES = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
GRIDS: dict[str, tuple[float, ...]] = {
    "theta": (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
    "temperature": (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0),
    "lambda_": SHARES,
    "alpha": (float("-inf"), -100.0, -50.0, -30.0, -20.0, -15.0, -10.0, -8.0, -6.0, -4.0, -2.0, 0.0, 2.0, 4.0),
}
"""What is tried of a setting that the user does not give. Products of hidden states behind a norm are as large as these
are wide, and distances twice that, so that sharpness goes by powers."""


@dataclass(frozen=True)
class Neural:
    """The neural cache, as `NeuralCache` has it; None is tuned."""

    size: int = 2000
    theta: float | None = None
    lambda_: float | None = None
    form: Literal["linear", "joint"] = "linear"
    alpha: float | None = None

    def __post_init__(self) -> None:
        if self.form == "linear" and self.alpha is not None:
            raise ValueError(f"neural.alpha={self.alpha} is of neural.form=joint; give both, or neither")
        if self.form == "joint" and self.lambda_ is not None:
            raise ValueError(
                f"neural.lambda={self.lambda_} is of neural.form=linear; leave it out, or give neural.alpha"
            )

    def tuned(self) -> tuple[str, ...]:
        """Settings that the validation split chooses."""
        names = ("theta", "lambda_" if self.form == "linear" else "alpha")
        return tuple(name for name in names if getattr(self, name) is None)

    def cache(self) -> OutputCache:
        """The cache, with its defaults for what is tuned."""
        given = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return NeuralCache(**given)


@dataclass(frozen=True)
class KNN:
    """kNN-LM, as `KNNLM` and `Datastore` have it; None is tuned.

    `key` and `dtype` are those of a datastore that is built; `folder` is where it is kept, RUN/datastore when None.
    """

    k: int = 1024
    temperature: float | None = None
    lambda_: float | None = None
    key: Literal["feed_forward", "last_hidden"] = "feed_forward"
    dtype: Literal["float16", "float32"] = "float16"
    search: str = "exact"
    probes: int = 32
    folder: str | None = None

    def tuned(self) -> tuple[str, ...]:
        """Settings that the validation split chooses."""
        return tuple(name for name in ("temperature", "lambda_") if getattr(self, name) is None)


OUTPUT_CACHES: dict[str, Callable[..., Neural | KNN]] = {"neural": Neural, "knn": KNN}


def cache_options(name: str, overrides: Sequence[str]) -> Neural | KNN:
    """The options of a cache from words `NAME.option=value`.

    Raises:
        ValueError: an unknown cache or option, that of another cache, or a value that it cannot have.
    """
    if name not in OUTPUT_CACHES:
        raise ValueError(unknown_name("output cache", name, list(OUTPUT_CACHES)))
    tree: dict[str, Any] = {name: {}}
    for override in overrides:
        begin = override.partition("=")[0].partition(".")[0]
        if begin != name:
            raise ValueError(
                f"{override!r} sets an option of {begin!r}, and the output cache is {name!r}; write {name}.option=value"
            )
        apply_override(tree, override)
    if not isinstance(tree[name], dict):
        raise ValueError(f"{name}={tree[name]!r} sets no option; write {name}.option=value")
    hints = {_shown(option): hint for option, hint in hints_of(OUTPUT_CACHES[name]).items()}
    found = {}
    for option, value in tree[name].items():
        if option not in hints:
            raise ValueError(unknown_name(f"option of the output cache {name!r}", option, list(hints)))
        found["lambda_" if option == "lambda" else option] = check_type(f"{name}.{option}", value, hints[option])
    options = OUTPUT_CACHES[name](**found)
    _trial(options)
    return options


def evaluate_output_cache(
    folder: Path, config: RunConfig, checkpoint: str, split: str, options: Neural | KNN, device: str
) -> dict[str, Any]:
    """Scores of a split without and with a cache.

    Returns:
        "split"; "step" of the weights; "scores", rows of {"output_cache": "none" or the name, score: value}; and
        "output_cache": {"name", "options", "tuned": options that validation chose, "at_end": those of them whose value
        is the first or last that was tried, "validation": {"without", "with"} losses, where something was tuned,
        "entries" of a datastore, "seconds": {"store", "tune", "score"}}.

    Raises:
        ValueError: the run is no language model; the datastore is that of another one; its own text is asked for.
    """

    def work(processes: World) -> dict[str, Any]:
        return _evaluated(folder, config, checkpoint, split, options, processes)

    return in_world(device, work)


def _evaluated(
    folder: Path, config: RunConfig, checkpoint: str, split: str, options: Neural | KNN, processes: World
) -> dict[str, Any]:
    name = "neural" if isinstance(options, Neural) else "knn"
    dataset = build_dataset(config, split)
    if task_name(dataset) != "language":
        raise ValueError(
            f"--output-cache {name} mixes what follows into the predictions of a language model, and {folder} was "
            f"trained on {dataset.name!r}; leave it out"
        )
    if name == "knn" and split == "train":
        raise ValueError("--split train: the datastore holds these very tokens, and each would find itself")
    _, model, step = load_run(folder, checkpoint)
    model.to(processes.device)
    clock, seconds = time.perf_counter, {}
    begin = clock()
    cache = options.cache() if isinstance(options, Neural) else _knn(folder, config, model, options, processes)
    seconds["store"] = clock() - begin
    about: dict[str, Any] = {"name": name, "tuned": [_shown(option) for option in options.tuned()]}
    if options.tuned():
        begin = clock()
        validation = dataset if split == "validation" else build_dataset(config, "validation")
        cache, about["validation"] = _tuned(model, validation, processes, config, cache, options.tuned())
        seconds["tune"] = clock() - begin
        about["at_end"] = [_shown(option) for option in options.tuned() if _at_end(option, getattr(cache, option))]
    begin = clock()
    nats, tokens = cache_losses(model, dataset, processes, config, [cache])
    seconds["score"] = clock() - begin
    about["options"] = {_shown(option): getattr(cache, option, value) for option, value in _used(options).items()}
    if isinstance(cache, KNNLM):
        about["entries"] = len(cache.datastore)
    rows = [
        {"output_cache": label, **dataset.scores(loss, tokens)}
        for label, loss in zip(("none", name), nats.tolist(), strict=True)
    ]
    return {"split": split, "step": step, "scores": rows, "output_cache": {**about, "seconds": seconds}}


def _tuned(
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
    """Whether there may be better values beyond those that were tried; below 0, or minus infinity, is nothing."""
    return value in (GRIDS[option][0], GRIDS[option][-1]) and value not in (0.0, float("-inf"))


def _knn(folder: Path, config: RunConfig, model: nn.Module, options: KNN, processes: World) -> KNNLM:
    """The cache over the datastore of the run, which is built where there is none."""
    path = folder / "datastore" if options.folder is None else Path(options.folder)
    train = build_dataset(config, "train")
    about = {
        "fingerprint": fingerprint(model),
        "text": _digest(train),
        "segment_length": segment_length(config),
        "key": options.key,
        "dtype": options.dtype,
    }
    if not path.exists() and processes.main:
        build_datastore(path, model, train, processes.device, config, about)
    processes.barrier()
    return KNNLM(load(path, about, options.search, options.probes), **_given(options))


def _given(options: KNN) -> dict[str, Any]:
    """What `KNNLM` takes of the options that are given."""
    values = {name: getattr(options, name) for name in ("k", "temperature", "lambda_")}
    return {name: value for name, value in values.items() if value is not None}


def _trial(options: Neural | KNN) -> None:
    """Refuse (ValueError) values out of their range, before anything is read."""
    if isinstance(options, Neural):
        options.cache()
    else:
        KNNLM(Datastore(torch.zeros(1, 1), torch.zeros(1), None, options.search, options.probes), **_given(options))


def _used(options: Neural | KNN) -> Mapping[str, Any]:
    """Options that take part."""
    form = getattr(options, "form", None)  # of a neural cache
    unused = {None: "", "linear": "alpha", "joint": "lambda_"}[form]
    return {name: value for name, value in dataclasses.asdict(options).items() if name != unused}


def _digest(dataset: TextDataset) -> str:
    """Of the token ids and where documents begin."""
    digest = hashlib.sha256()
    for array in (dataset.tokens, dataset.starts):
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()


def _shown(option: str) -> str:
    """An option as it is called on the command line: Python's `lambda_` is `lambda`."""
    return option.rstrip("_")
