"""Sizes that a recipe takes from its data, found without the data: vocabulary, classes, image size and row length.

Sources in order: the caller, `model`, `data`, known published data sets, and generated data sets, which foretell their
sizes. A size that is still missing is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cached_lab.registries import DATASETS
from cached_lab.tasks.recipes import LEARNED_FROM_DATA, MEMORY_LEARNS_FROM_DATA, fill_from_data
from cached_lab.training.config import RunConfig
from cached_transformers.memories import memory_specs
from cached_transformers.registry import MEMORIES, MODELS

from .rehearsal import RowShape

KNOWN: dict[str, dict[str, int]] = {
    "wikitext103": {"vocabulary": 267_735},
    "wikitext2": {"vocabulary": 33_278},
    "ptb": {"vocabulary": 10_000},
    "enwik8": {"vocabulary": 256},
    "imagenet": {"classes": 1000, "channels": 3},
    "tiny_imagenet": {"classes": 200, "channels": 3, "image_size": 64},
    "cifar10": {"classes": 10, "channels": 3, "image_size": 32},
    "cifar100": {"classes": 100, "channels": 3, "image_size": 32},
    "digits": {"classes": 10, "channels": 1, "image_size": 8},
    "listops_tsv": {"classes": 10, "vocabulary": 16, "max_length": 2000},
}
"""Published data sets in their usual form."""
EQUAL_LENGTHS = ("planted_documents",)
"""Data with rows of equal length, without a padding mask."""
SENTENCE = 32
"""Assumed tokens of a pair's longer side with `training.batch_tokens`."""
SPECIAL = 4 + 100
"""Ids that denoising adds: mask, padding, begin and end, and at most 100 sentinels."""


@dataclass(frozen=True)
class Given:
    """Sizes from the caller, each None if left open; `length` is the tokens of a row."""

    vocabulary: int | None = None
    target_vocabulary: int | None = None
    classes: int | None = None
    image_size: int | None = None
    channels: int | None = None
    length: int | None = None

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value is not None and value < 1:
                raise ValueError(f"{option(name)} {value} must be at least 1")


@dataclass(frozen=True)
class Sized:
    """A complete configuration, the shape of a row, the rows of a step, and assumptions as sentences."""

    config: RunConfig
    shape: RowShape
    rows: int
    assumed: tuple[str, ...]


def option(name: str) -> str:
    """Return the command-line option of a size."""
    return f"--{name.replace('_', '-')}"


def sized(config: RunConfig, given: Given) -> Sized:
    """Complete a recipe with its sizes.

    Raises:
        ValueError: a size is unknown (the message names its option) or unused, or the task cannot be planned.
    """
    name = config.data["name"]
    factory = DATASETS.entry(name).factory
    task = getattr(factory, "task", "classification")
    if task == "detection":
        raise ValueError(
            f"data {name!r} are images with objects, whose number changes what a detector stores; measure a few steps "
            "instead: cached train ... training.steps=10"
        )
    known, data = dict(KNOWN.get(name, {})), _data_sizes(config, task)
    if config.data.get("tokenizer", "word") != "word":  # not the vocabulary of words
        known.pop("vocabulary", None)
    foretold: Mapping[str, Any] = {}
    if hasattr(factory, "foretell"):
        foretold = factory.foretell(**{key: value for key, value in config.data.items() if key != "name"})
    options = MODELS.entry(config.model["name"]).options
    wanted = [key for key in LEARNED_FROM_DATA if key in options and key not in config.model]
    if task in ("classification", "documents") and config.model.get("classes") is None:
        wanted = [*dict.fromkeys([*wanted, "classes"])]
    _refuse_unused(config, given, wanted)
    facts: dict[str, Any] = {}
    assumed = []
    for key in wanted:
        sources = [getattr(given, key, None), data.get(key), foretold.get(key), known.get(key)]
        if key == "max_length":  # rows may be shorter than the longest possible
            sources.append(given.length)
        found = next((number for number, value in enumerate(sources) if value is not None), None)
        if found is not None:
            facts[key] = sources[found]
            if found == 3:
                assumed.append(f"{key.replace('_', ' ')} {facts[key]:,}, as {name} has")
        elif key not in options or options[key].default is options[key].empty:
            way = option("length" if key == "max_length" else key)
            raise ValueError(f"the recipe does not say {key} of data {name!r}; give {way} N, or set model.{key}=N")
    for part, _ in memory_specs(config.model.get("memory")):
        facts |= {key: [1] for key in MEMORY_LEARNS_FROM_DATA if key in MEMORIES.entry(part).options}
    config = fill_from_data(config, facts)
    shape, rows, more = _row_shape(config, given, task, facts)
    return Sized(config, shape, rows, (*assumed, *more))


def _refuse_unused(config: RunConfig, given: Given, wanted: list[str]) -> None:
    images = "vocabulary" not in MODELS.entry(config.model["name"]).options
    for name, value in dataclasses.asdict(given).items():
        if value is None or name in wanted:
            continue
        if name in config.model:
            raise ValueError(
                f"{option(name)} {value}: the recipe says model.{name}={config.model[name]}; change that instead"
            )
        if not (name in ("image_size", "channels") if images else name == "length"):
            raise ValueError(f"{option(name)} {value} is not used by model {config.model['name']!r}; leave it out")


def _data_sizes(config: RunConfig, task: str) -> dict[str, Any]:
    """Return the sizes among the options of the data, defaults included."""
    parameters = DATASETS.entry(config.data["name"]).options
    data = {key: p.default for key, p in parameters.items() if p.default is not p.empty} | config.data
    keys = ("image_size", "channels", "classes", "max_length", "segments", "segment_length")
    found = {key: data.get(key) for key in keys} | {"vocabulary": data.get("vocabulary_size")}
    if task == "documents":
        found["max_length"] = data.get("segment_length")
    if config.data["name"] == "denoising" and found["vocabulary"] is not None:
        found["vocabulary"] += 4 + data["sentinels"] if data.get("sentinels") is not None else SPECIAL
    if data.get("tokenizer") == "byte":
        found["vocabulary"] = 256
    return found


def _row_shape(config: RunConfig, given: Given, task: str, facts: Mapping[str, Any]) -> tuple[RowShape, int, list[str]]:
    """Return the shape of a row, the rows of a step, and assumptions."""
    name, settings, data = config.data["name"], config.training, _data_sizes(config, task)
    rows, classes = settings.batch_size, config.model.get("classes") or facts.get("classes") or 0
    if task == "language":
        if given.length is not None:
            raise ValueError("--length is not for text; set training.segment_length and training.segments")
        return RowShape(task, settings.segment_length * settings.segments), rows, []
    if task == "documents":
        segments, each = data["segments"], data["segment_length"]
        if given.length is not None and each:
            segments = -(-given.length // each)
        if not segments or not each:
            raise ValueError(f"data {name!r} have documents of any length; give --length N, the tokens of the longest")
        padded = name not in EQUAL_LENGTHS
        return RowShape(task, segments * each, classes, each, segments, padded=padded), rows, []
    if task == "translation":
        length: int = given.length or data["max_length"] or facts["max_length"]
        assumed = []
        if settings.batch_tokens is not None:
            length = given.length or SENTENCE
            rows = max(1, settings.batch_tokens // length)
            assumed = [f"batches of {rows:,} pairs of {length} tokens a side, padding included (--length)"]
        return RowShape(task, length, padded=True), rows, assumed
    if "vocabulary" in MODELS.entry(config.model["name"]).options:
        length = given.length or config.model.get("max_length") or facts["max_length"]
        assumed = [f"rows of the maximal length, {length:,} tokens (--length)"] if given.length is None else []
        return RowShape(task, length, classes, padded=True), rows, assumed
    known = KNOWN.get(name, {}).get("image_size")
    size = given.image_size or config.model.get("image_size") or data["image_size"] or facts.get("image_size") or known
    if size is None:
        raise ValueError(f"the recipe does not say the image size of data {name!r}; give --image-size N")
    channels = given.channels or config.model.get("channels") or facts.get("channels") or 3
    return RowShape(task, classes=classes, image=(channels, size, size)), rows, []
