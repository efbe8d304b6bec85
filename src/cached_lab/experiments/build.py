"""What a configuration names, built: one split of the data, or the model; and whether it can be built at all."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
from torch import nn

from cached_lab.registries import DATASETS
from cached_lab.tasks.recipes import LEARNED_FROM_DATA, MEMORY_LEARNS_FROM_DATA, fill_from_data
from cached_lab.training.checkpoint import seed_everything
from cached_lab.training.config import RunConfig
from cached_transformers.memories import memory_specs
from cached_transformers.registry import MEMORIES, MODELS


def build_dataset(config: RunConfig, split: str) -> Any:
    """One split of the configured data."""
    return DATASETS.create(**config.data, split=split)


def build_model(config: RunConfig) -> nn.Module:
    """The configured model with weights that depend on `training.seed` alone.

    Raises:
        ValueError: the options do not fit each other, or the model does not fit into the memory of this machine.
    """
    _refuse_too_large(config)
    seed_everything(config.training.seed)
    return MODELS.create(**config.model)


def without_checkpoint(config: RunConfig) -> RunConfig:
    """The configuration without the weights that training began with: a trained run has its own."""
    if config.model.get("checkpoint") is None:
        return config
    return dataclasses.replace(config, model={**config.model, "checkpoint": None})


def with_memory(config: RunConfig, memory: str | dict[str, Any] | None) -> RunConfig:
    """The same configuration with another memory in the model."""
    return dataclasses.replace(config, model={**config.model, "memory": memory})


def memory_name(config: RunConfig) -> str:
    """Name of the model's memory, "plain" when it has none; of several their names with a plus between."""
    return "+".join(name for name, _ in memory_specs(config.model.get("memory"))) or "plain"


def filled(config: RunConfig) -> RunConfig:
    """The configuration with what the data fill in; they are read only where something is left to them.

    Data that are long in the making may have a class method `foretell(**options)`, which says what a model needs.

    Raises:
        ValueError, FileNotFoundError: the data do not say what the model needs, or are not there.
    """
    open_options = {*MODELS.entry(config.model["name"]).options} & {*LEARNED_FROM_DATA} - {*config.model}
    for name, options in memory_specs(config.model.get("memory")):
        open_options |= {*MEMORIES.entry(name).options} & {*MEMORY_LEARNS_FROM_DATA} - {*options}
    if not open_options:
        return config
    if foretell := getattr(DATASETS.entry(config.data["name"]).factory, "foretell", None):
        return fill_from_data(config, foretell(**{key: value for key, value in config.data.items() if key != "name"}))
    return fill_from_data(config, build_dataset(config, "train").describe())


def _refuse_too_large(config: RunConfig) -> None:
    """Count the bytes of the model before they are asked for: a system that lends too much ends the process later."""
    if config.model.get("pretrained"):
        return
    with torch.device("meta"):
        model = MODELS.create(**without_checkpoint(config).model)
    size = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > room:
        raise ValueError(
            f"model {config.model['name']!r} has {size / 2**30:,.1f} GiB of weights and caches, this machine "
            f"{room / 2**30:,.1f} GiB of memory; lower model.width, model.depth, or the length of its memory"
        )


def refuse_what_cannot_be_built(config: RunConfig) -> None:
    """Build the model where it takes neither memory nor time, on the meta device, and throw it away.

    A model that begins with published weights is built as it will be: it is they that say how large it is.

    Raises:
        ValueError: what building it raises, which names what does not fit.
    """
    with torch.device("cpu" if config.model.get("pretrained") else "meta"):
        MODELS.create(**without_checkpoint(config).model)
