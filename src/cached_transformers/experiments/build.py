"""What a configuration names, built: one split of the data, or the model."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from cached_transformers.registry import DATASETS, MODELS
from cached_transformers.training.checkpoint import seed_everything
from cached_transformers.training.config import RunConfig


def build_dataset(config: RunConfig, split: str) -> Any:
    """One split of the configured data."""
    return DATASETS.create(**config.data, split=split)


def build_model(config: RunConfig) -> nn.Module:
    """The configured model with weights that depend on `training.seed` alone."""
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
    """Name of the model's memory, "plain" when it has none."""
    memory = config.model.get("memory")
    return "plain" if memory is None else memory if isinstance(memory, str) else memory["name"]
