"""What a recipe takes from its data, said without them: vocabulary, classes, image size, and how long a row is.

In order: what the caller gives, what `model` says, what `data` says, what is known of a published data set, and what
generated data foretell. Whatever is left open is asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cached_lab.registries import DATASETS
from cached_lab.tasks.recipes import LEARNED_FROM_DATA, MEMORY_LEARNS_FROM_DATA, fill_from_data
from cached_lab.training.config import RunConfig
from cached_transformers.memories import memory_specs
from cached_transformers.registry import MEMORIES, MODELS

from .rehearsal import Shape

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
"""Of published data sets in the form in which they are usually read."""
ALIKE = ("planted_documents",)
"""Data whose rows are all as long, so that no mask of padding is made."""
SENTENCE = 32
"""Tokens of a pair's longer side where batches are made of so many tokens, and the rows are as many as fit."""
SPECIAL = 4 + 100
"""Ids that denoising adds: mask, padding, begin and end, and at most so many sentinels."""


@dataclass(frozen=True)
class Given:
    """Sizes that the caller knows, each None where it is left open; `length` is the tokens of a row."""

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
    """A configuration with all that its model needs, what a row is, and how many rows a step has.

    Attributes:
        assumed: sentences about what was not in the recipe.
    """

    config: RunConfig
    shape: Shape
    rows: int
    assumed: tuple[str, ...]


def option(name: str) -> str:
    """A size as an option of the command."""
    return f"--{name.replace('_', '-')}"


def sized(config: RunConfig, given: Given) -> Sized:
    """The recipe with its sizes.

    Raises:
        ValueError: a size is not known (the message names the option that gives it), does not fit the others, or the
            task is one that cannot be planned.
    """
    name = config.data["name"]
    task = getattr(DATASETS.entry(name).factory, "task", "classification")
    if task == "detection":
        raise ValueError(
            f"data {name!r} are images with objects, whose number decides what a detector keeps; a plan is made of "
            "shapes alone. Measure a few steps instead: cached train ... training.steps=10"
        )
    facts, assumed = _facts(config, given, task)
    config = fill_from_data(config, facts)
    shape, rows, more = _shape(config, given, task, facts)
    return Sized(config, shape, rows, (*assumed, *more))


def _facts(config: RunConfig, given: Given, task: str) -> tuple[dict[str, Any], list[str]]:
    """Stand-in for what the data describe, as far as the model wants it, and what of it was assumed."""
    name, options = config.data["name"], MODELS.entry(config.model["name"]).options
    known, said = dict(KNOWN.get(name, {})), _of_data(config, task)
    if config.data.get("tokenizer", "word") != "word":  # another vocabulary than that of its words
        known.pop("vocabulary", None)
    foretold: Mapping[str, Any] = {}
    if foretell := getattr(DATASETS.entry(name).factory, "foretell", None):
        foretold = foretell(**{key: value for key, value in config.data.items() if key != "name"})
    facts: dict[str, Any] = {}
    assumed = []
    wanted = [key for key in LEARNED_FROM_DATA if key in options and key not in config.model]
    if task in ("classification", "documents") and config.model.get("classes") is None:
        wanted = [*dict.fromkeys([*wanted, "classes"])]
    _refuse_unused(config, given, wanted)
    for key in wanted:
        values = [
            (getattr(given, key, None), ""),
            (said.get(key), ""),
            (foretold.get(key), ""),
            (known.get(key), "known"),
        ]
        if key == "max_length":  # rows may be shorter than the longest that there may be
            values.append((given.length, ""))
        for value, source in values:
            if value is not None:
                facts[key] = value
                if source:
                    assumed.append(f"{key.replace('_', ' ')} {value:,}, as {name} has")
                break
        else:
            if key not in options or options[key].default is options[key].empty:
                place = "length" if key == "max_length" else key
                raise ValueError(
                    f"the recipe does not say {key}, which data {name!r} would tell; give {option(place)} N, or set "
                    f"model.{key}=N"
                )
    for part, _ in memory_specs(config.model.get("memory")):
        facts |= {key: [1] for key in MEMORY_LEARNS_FROM_DATA if key in MEMORIES.entry(part).options}
    return facts, assumed


def _refuse_unused(config: RunConfig, given: Given, wanted: Sequence[str]) -> None:
    """Refuse sizes that would change nothing (ValueError)."""
    images = "vocabulary" not in MODELS.entry(config.model["name"]).options
    for name, value in dataclasses.asdict(given).items():
        if value is None or name in wanted:
            continue
        if name in config.model:
            raise ValueError(
                f"{option(name)} {value}: the recipe says model.{name}={config.model[name]}; change that, or leave "
                "the option out"
            )
        fits = name in ("image_size", "channels") if images else name == "length"
        if not fits:
            raise ValueError(
                f"{option(name)} {value} is nothing that model {config.model['name']!r} takes from its data; leave it "
                "out"
            )


def _of_data(config: RunConfig, task: str) -> dict[str, Any]:
    """Sizes among the options of the data, their defaults included."""
    parameters = DATASETS.entry(config.data["name"]).options
    defaults = {key: p.default for key, p in parameters.items() if p.default is not p.empty}
    data = {**defaults, **config.data}
    found = {key: data.get(key) for key in ("image_size", "channels", "classes", "max_length")}
    found["vocabulary"] = data.get("vocabulary_size")
    if task == "documents":
        found["max_length"] = data.get("segment_length")
    if config.data["name"] == "denoising" and found["vocabulary"] is not None:
        found["vocabulary"] += 4 + data["sentinels"] if data.get("sentinels") is not None else SPECIAL
    if task == "translation" and data.get("joint") is False:
        found["target_vocabulary"] = found["vocabulary"]
    if data.get("tokenizer") == "byte":
        found["vocabulary"] = 256
    return found | {"segments": data.get("segments"), "segment_length": data.get("segment_length")}


def _shape(config: RunConfig, given: Given, task: str, facts: Mapping[str, Any]) -> tuple[Shape, int, list[str]]:
    """What a row is, how many a step has, and what was assumed."""
    settings, data = config.training, _of_data(config, task)
    classes = config.model.get("classes") or facts.get("classes") or 0
    if task == "language":
        if given.length is not None:
            raise ValueError("--length is not for text; set training.segment_length and training.segments")
        return Shape(task, settings.segment_length * settings.segments), settings.batch_size, []
    if task == "documents":
        segments, each = data["segments"], data["segment_length"]
        if given.length is not None and each:
            segments = -(-given.length // each)
        if not segments or not each:
            raise ValueError(
                f"data {config.data['name']!r} are read as long as they are; give --length N, the tokens of the longest"
            )
        padded = config.data["name"] not in ALIKE
        return Shape(task, segments * each, classes, each, segments, padded=padded), settings.batch_size, []
    if task == "translation":
        length: int = given.length or data["max_length"] or facts["max_length"]
        rows, assumed = settings.batch_size, list[str]()
        if settings.batch_tokens is not None:
            length = given.length or SENTENCE
            rows = max(1, settings.batch_tokens // length)
            assumed = [f"batches of {rows:,} pairs of {length} tokens a side, padding included (--length)"]
        return Shape(task, length, padded=True), rows, assumed
    size = given.image_size or config.model.get("image_size") or data["image_size"] or facts.get("image_size")
    if "vocabulary" in MODELS.entry(config.model["name"]).options:
        length = given.length or config.model.get("max_length") or facts["max_length"]
        rows_are = [f"rows as long as they may be, {length:,} tokens (--length)"] if given.length is None else []
        return Shape(task, length, classes, padded=True), settings.batch_size, rows_are
    size = size or KNOWN.get(config.data["name"], {}).get("image_size")
    if size is None:
        raise ValueError(
            f"the recipe does not say how large the images of data {config.data['name']!r} are; give --image-size N"
        )
    channels = given.channels or config.model.get("channels") or facts.get("channels") or 3
    return Shape(task, classes=classes, image=(channels, size, size)), settings.batch_size, []
