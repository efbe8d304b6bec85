"""Load a decoder with a memory and its tokenizer for a chat."""

from __future__ import annotations

from typing import Any

import torch

from cached_lab.experiments.probes.settings import options_of_memories
from cached_transformers import add_memory
from cached_transformers.extras import require
from cached_transformers.integrations.hub import records_memory
from cached_transformers.registry import MEMORIES

MEMORY = "streaming_llm"
"""Default memory of a model without one: it has no weights."""
WINDOW, SEGMENT, SINKS = 512, 256, 4
"""Slots, tokens of a segment, and slots among them for the first tokens, where the model's context has room."""


def load_chat_model(name: str, memory: str | None, device: torch.device) -> tuple[Any, Any]:
    """Load a decoder and its tokenizer, and add a memory to a model without one.

    Args:
        name: a folder of `save_pretrained`, or a repository of the Hugging Face hub.
        memory: "NAME" or "NAME,option=value,..."; None for the model's own, or `MEMORY`.

    Raises:
        ValueError: no such model; the model has a memory already, or the memory has weights that are not trained.
    """
    model, tokenizer = _load(name)
    if not records_memory(model.config):
        _add(model, memory or MEMORY)
    elif memory is not None:
        own = model.config.cached_transformers["memory"]["name"]
        raise ValueError(f"--memory {memory}: {name} has the memory {own!r} already; leave the option out")
    return model.to(device).eval(), tokenizer


def _load(name: str) -> tuple[Any, Any]:
    transformers = require("transformers", extra="language")
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(name)
        return model, transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{name}: transformers loads no decoder and tokenizer from it ({' '.join(str(error).split())}); give a "
            "folder of save_pretrained that holds both, or a model of the Hugging Face hub"
        ) from None


def _add(model: Any, memory: str) -> None:
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
    if "weights" in getattr(MEMORIES.entry(name).factory, "needs", ()):
        model.set_attn_implementation("eager")
    plain = model.state_dict().keys()
    add_memory(model, name, **options, segment_length=length)
    if added := sorted(model.state_dict().keys() - plain):
        raise ValueError(
            f"--memory {memory}: it has weights that are not trained, such as {added[0]!r}; take a memory without "
            "weights (streaming_llm, tova, h2o), or give a model that was trained with it"
        )
