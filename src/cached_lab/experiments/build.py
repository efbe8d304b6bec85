"""Build the data and the model that a configuration names."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from cached_lab.registries import DATASETS
from cached_lab.tasks.recipes import LEARNED_FROM_DATA, MEMORY_LEARNS_FROM_DATA, fill_from_data
from cached_lab.training.checkpoint import seed_everything
from cached_lab.training.config import RunConfig
from cached_transformers.memories import MemorySpec, memory_specs
from cached_transformers.registry import MEMORIES, MODELS

from .pretrained import located, refuse_too_large


def build_dataset(config: RunConfig, split: str) -> Any:
    """Build one split of the configured data."""
    return DATASETS.create(**config.data, split=split)


def build_model(config: RunConfig) -> nn.Module:
    """Build the configured model with weights that depend only on `training.seed`.

    Raises:
        ValueError: the options do not fit each other, or the model does not fit into the memory of this machine.
    """
    if not config.model.get("pretrained"):  # an overcommitting system would end the process only later
        with torch.device("meta"):
            model = MODELS.create(**without_checkpoint(config).model)
        size = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        refuse_too_large(config.model["name"], size)
    seed_everything(config.training.seed)
    return MODELS.create(**_located(config))


def _located(config: RunConfig) -> dict[str, Any]:
    """Return the options of the model, with the place of `pretrained` weights that are named as in `resolve_model`."""
    if not isinstance(name := config.model.get("pretrained"), str):
        return config.model
    place, options = located(name)
    return {**config.model, "pretrained": place, **options}


def without_checkpoint(config: RunConfig) -> RunConfig:
    """Return the configuration without initial weights: a trained run has its own."""
    if config.model.get("checkpoint") is None:
        return config
    return dataclasses.replace(config, model={**config.model, "checkpoint": None})


def with_memory(config: RunConfig, memory: MemorySpec) -> RunConfig:
    """Return the configuration with another memory in the model."""
    return dataclasses.replace(config, model={**config.model, "memory": memory})


def memory_name(config: RunConfig) -> str:
    """Return the name of the model's memory: "plain" for none, names joined by a plus for several."""
    return "+".join(name for name, _ in memory_specs(config.model.get("memory"))) or "plain"


def filled(config: RunConfig) -> RunConfig:
    """Fill in the options that depend on the data; the data are built only if such options are open.

    Data that take long to make may have a class method `foretell(**options)`, which returns the needs of a model.

    Raises:
        ValueError, FileNotFoundError: the data do not provide an option, or are absent.
    """
    open_options = {*MODELS.entry(config.model["name"]).options} & {*LEARNED_FROM_DATA} - {*config.model}
    for name, options in memory_specs(config.model.get("memory")):
        open_options |= {*MEMORIES.entry(name).options} & {*MEMORY_LEARNS_FROM_DATA} - {*options}
    if not open_options:
        return config
    if foretell := getattr(DATASETS.entry(config.data["name"]).factory, "foretell", None):
        return fill_from_data(config, foretell(**{key: value for key, value in config.data.items() if key != "name"}))
    return fill_from_data(config, build_dataset(config, "train").describe())


def refuse_what_cannot_be_built(config: RunConfig) -> nn.Module:
    """Build the model on the meta device, or with its published weights, which set its sizes.

    Raises:
        ValueError: an option does not fit.
    """
    with torch.device("cpu" if config.model.get("pretrained") else "meta"):
        return MODELS.create(**_located(without_checkpoint(config)))
