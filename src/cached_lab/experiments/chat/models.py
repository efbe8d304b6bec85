"""Load a decoder with a memory and its tokenizer for a chat."""

from __future__ import annotations

from typing import Any

import torch

from cached_lab.experiments.pretrained import remember, resolve_model
from cached_lab.experiments.probes.settings import options_of_memories
from cached_transformers.integrations.hub import records_memory

MEMORY = "streaming_llm"
"""Default memory of a model without one: it has no weights."""
WINDOW, SEGMENT, SINKS = 512, 256, 4
"""Slots, tokens of a segment, and slots among them for the first tokens, where the model's context has room."""


def load_chat_model(name: str, memory: str | None, device: torch.device) -> tuple[Any, Any]:
    """Load a decoder and its tokenizer, and add a memory to a model without one.

    Args:
        name: see `resolve_model`.
        memory: "NAME" or "NAME,option=value,..."; None for the model's own, or `MEMORY`.

    Raises:
        ValueError: no such model; the model has a memory already, or the memory has weights that are not trained.
    """
    model, tokenizer = resolve_model(name)
    if not records_memory(model.config):
        _add(model, name, memory or MEMORY)
    elif memory is not None:
        own = model.config.cached_transformers["memory"]["name"]
        raise ValueError(f"--memory {memory}: {name} has the memory {own!r} already; leave the option out")
    return model.to(device).eval(), tokenizer


def _add(model: Any, model_name: str, memory: str) -> None:
    """Add a memory without weights."""
    name, *pairs = memory.split(",")
    if odd := [pair for pair in pairs if "=" not in pair]:
        raise ValueError(f"--memory {memory}: {odd[0]!r} sets no option; write NAME,option=value,...")
    segments = [pair.partition("=")[2] for pair in pairs if pair.startswith("segment_length=")]
    if segments and not segments[-1].isdecimal():
        raise ValueError(f"--memory segment_length={segments[-1]}: must be a whole number of tokens")
    context = getattr(model.config, "max_position_embeddings", None) or 4 * SEGMENT
    length = int(segments[-1]) if segments else min(SEGMENT, context // 4)
    rest = [f"{name}.{pair}" for pair in pairs if not pair.startswith("segment_length=")]
    options = options_of_memories([name], rest).get(name, {})
    if name == MEMORY and not options:
        options = {"length": min(WINDOW, context // 2) - SINKS, "sinks": SINKS}
    remember(model, model_name, {"name": name, **options}, length)
