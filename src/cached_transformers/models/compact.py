"""Merging what a model has read into fewer slots, by Attention Matching (see `memories/attention_matching.py`)."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from cached_transformers.memories.attention_matching import AttentionMatching
from cached_transformers.memories.parts.scored_cache import ScoredSlots
from cached_transformers.state import State, seal

from .segments import for_loops, host_reader


@torch.no_grad()
def compact(model: nn.Module, memory_state: State, slots: int) -> State:
    """Merge the slots of a state into fewer ones, with the attention of the stream's last queries.

    The result has the shape of the state, so that the text continues from it; only `slots` of its slots hold something.

    Args:
        model: a decoder or language model with the memory attention_matching in its layers.
        memory_state: after the text, of any number of rows.
        slots: filled slots per layer, at most the memory's `length`.

    Raises:
        ValueError: a memory without biases, or fewer slots than its sinks and newest tokens need.

    Example:
        >>> model = add_memory(decoder, "attention_matching", length=2048, segment_length=512)
        >>> state = compact(model, model(contract).memory_state, slots=256)
        >>> model(question, memory_state=state).logits
    """
    forward = host_reader(model)
    if forward is not None:
        state = forward.checked_state(memory_state, len(memory_state.clock_B))
        like_11D = state.clock_B.new_zeros(1, 1, forward.body.config.hidden_size).to(next(model.parameters()).dtype)
        zero_B1 = state.clock_B.new_zeros(len(state.clock_B), 1)
        layers = [(hook.memory, partial(hook._placed, zero_B1, zero_B1, like_11D)) for hook in forward.hooks]
    else:
        reader = for_loops(model)
        reader.check_state(memory_state, len(memory_state.clock_B))
        state = memory_state
        layers = [(block.attention.memory, block.attention.positions.rotate) for block in reader.stack.blocks]
    merged = []
    for (memory, turn), part in zip(layers, state.layers, strict=True):
        if not isinstance(memory, AttentionMatching) or not isinstance(part, ScoredSlots):
            name = f"memory {type(memory).__name__} with a state of {type(part).__name__}"
            raise ValueError(f"{name}: no slots with biases to merge; take attention_matching as the only memory")
        merged.append(memory.compact(part, slots, turn))
    return seal(state._replace(layers=tuple(merged)))
