"""Whether a configuration can be built, found out before anything is trained."""

from __future__ import annotations

import torch

from cached_transformers.memories import memory_spec
from cached_transformers.registry import MEMORIES, MODELS
from cached_transformers.training.config import (
    LEARNED_FROM_DATA,
    MEMORY_LEARNS_FROM_DATA,
    RunConfig,
    fill_from_data,
)

from .run import build_dataset, without_checkpoint


def filled(config: RunConfig) -> RunConfig:
    """The configuration with what the data fill in; they are read only where something is left to them.

    Raises:
        ValueError, FileNotFoundError: the data do not say what the model needs, or are not there.
    """
    open_options = {*MODELS.entry(config.model["name"]).options} & {*LEARNED_FROM_DATA} - {*config.model}
    if (memory := memory_spec(config.model.get("memory"))) is not None:
        name, options = memory
        open_options |= {*MEMORIES.entry(name).options} & {*MEMORY_LEARNS_FROM_DATA} - {*options}
    return fill_from_data(config, build_dataset(config, "train").describe()) if open_options else config


def refuse_what_cannot_be_built(config: RunConfig) -> None:
    """Build the model where it takes neither memory nor time, on the meta device, and throw it away.

    A model that begins with published weights is built as it will be: it is they that say how large it is.

    Args:
        config: with what the data fill in.

    Raises:
        ValueError: what building it raises, which names what does not fit.
    """
    with torch.device("cpu" if config.model.get("pretrained") else "meta"):
        MODELS.create(**without_checkpoint(config).model)
