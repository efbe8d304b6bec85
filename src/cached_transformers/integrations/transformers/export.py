"""Slots of a memory as `past_key_values` of the plain decoder, so that other engines go on from a text that was read.

A slot is a key and a value in each layer. Rotated to the places 0 ... M - 1, the slots of a state are a KV cache of M
tokens, and the next token is at place M: all distances are those that the memory offers.

Legend: B rows, M slots, G heads of keys, E head width, D model width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cached_transformers.integrations.memory_lookup import with_weights
from cached_transformers.interfaces.contexts import join
from cached_transformers.interfaces.incremental import enter_segment, read_segment
from cached_transformers.interfaces.memory import Context, Query, Tokens
from cached_transformers.models.segments import host_reader
from cached_transformers.state import State

from .memory_cache import DynamicCache

ONLY_SLOTS = frozenset({"state", "context", "stored_kv", "weights", "bias", "layer_traces", "turn"})
"""Needs of a memory whose whole effect is keys and values beside those of the segment."""


@torch.no_grad()
def export_cache(model: nn.Module, memory_state: State) -> Any:
    """Return the slots of a state as a DynamicCache for the same decoder without its memory.

    Args:
        model: a decoder of transformers with a memory in every layer.
        memory_state: after the text, from the output of the model.

    Raises:
        ValueError: a model or memory with more than slots, rows with different numbers of slots, or none.

    Example:
        >>> state = model(text).memory_state
        >>> cache = export_cache(model, state)
        >>> plain = remove_memory(model)
        >>> plain(question, past_key_values=cache).logits  # as model(question, memory_state=state).logits
    """
    forward = host_reader(model)
    if forward is None:
        raise ValueError(f"{type(model).__name__} has no memory with a state; call add_memory first")
    if forward.recurrent:
        raise ValueError(
            f"{type(model).__name__} has recurrent layers, whose states are no slots; continue with memory_state"
        )
    spanning = [] if forward.memory is None else [forward.memory]
    for memory in [*spanning, *(hook.memory for hook in forward.hooks)]:
        if more := memory.needs - ONLY_SLOTS:
            raise ValueError(
                f"memory {type(memory).__name__} needs {', '.join(sorted(more))}: more than a KV cache "
                "holds; take streaming_llm, or another memory of slots"
            )
    rows = len(memory_state.clock_B)
    state = forward.checked_state(memory_state, rows)
    x_B1D = state.clock_B.new_zeros(rows, 1, forward.body.config.hidden_size).to(next(model.parameters()).dtype)
    first_B11 = state.clock_B[:, None, None]
    entry = None
    if spanning:
        entry = with_weights(spanning[0], enter_segment, spanning[0], state.model, Tokens(x_B1D, first_B11), ())
    cache = DynamicCache()
    for number, hook in enumerate(forward.hooks):
        read = read_segment, hook.memory, state.layers[number], Query(x_B1D, positions_BNP=first_B11), hook.project_kv
        offer = None if entry is None or entry.contexts is None else entry.contexts[number]
        found = join(with_weights(hook.memory, *read).context, offer(hook.project_kv) if callable(offer) else offer)
        found, slots = _full_slots(found, f"layer {number}")
        places_BM = torch.arange(slots, device=x_B1D.device).expand(rows, -1)
        k_BGME, v_BGME = (t.expand(rows, -1, -1, -1)[:, :, -slots:] for t in (found.k_BHME, found.v_BHME))
        rotary = None if hook.rotary is None else hook.rotary.module
        cache.update(hook.turn(hook.layer, rotary, k_BGME, places_BM, x_B1D), v_BGME.contiguous(), number)
    return cache


def _full_slots(context: Context | None, layer: str) -> tuple[Context, int]:
    """The context, and the number of slots that hold something (ValueError: they are no KV cache)."""
    count_B = None if context is None else context.valid_BM.sum(1)
    if context is None or count_B is None or not int(count_B.max()):
        raise ValueError(f"memory_state of {layer} has no slot that holds anything; read a text first")
    biased = context.bias_BHM is not None and bool(context.bias_BHM.any())
    if biased or context.visible_BHNM is not None or context.gather is not None or not context.consecutive:
        raise ValueError(
            f"slots of {layer} are weighted or not at the places right before the segment, which a KV cache cannot "
            "express; take a memory with places='cache' and without weights"
        )
    slots = int(count_B[0])
    if not bool((count_B == slots).all()):
        raise ValueError(f"memory_state: rows hold {count_B.tolist()} slots; export rows of equal length one by one")
    return context, slots
