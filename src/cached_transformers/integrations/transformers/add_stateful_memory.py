"""Memories with a state in transformers' models: the state goes in as a keyword and comes back in the output.

    out = model(input_ids, memory_state=state);   state = out.memory_state

It is to segments as `past_key_values` is to tokens. The way of a state: `patch_model.py` takes it from the keyword,
`segmented_forward.py` (decoders) or `encoder_forward.py` carries it from segment to segment, `host_forward.py` runs the
host over one segment with the state in a `SegmentContext`, and `memory_hooks.py` and `context_hook.py` read and write
the memory there; a model-level memory runs the host's blocks as those of a stack.

Recurrent Memory Transformer on a pretrained decoder: arXiv:2207.06881; original: github.com/booydar/LM-RMT, whose
tokens around the segment enter as `inputs_embeds` too, and whose memory is the output after the host's final norm.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from cached_transformers.checks import at_least_one
from cached_transformers.integrations.build_memories import build_memories, refuse_second
from cached_transformers.integrations.hosts import Host, Site, Stream
from cached_transformers.integrations.memory_hooks import MemoryHook
from cached_transformers.interfaces.incremental import enter_segment
from cached_transformers.interfaces.memory import ModelMemory, Tokens

USUAL_LENGTH = 256
"""Suggested tokens in a segment, where the model has positions for them."""


def add_stream_memory(
    model: nn.Module, found: list[tuple[Site, Host]], name: str, settings: dict[str, Any], **sizes: Any
) -> None:
    """Give a model of transformers a memory with a state, in place.

    Args:
        sizes: `segment_length`, tokens in a segment, or None for one segment a call; required for a memory with a state
            in a model of texts. An image is a segment.

    Raises:
        ValueError: the memory, the model, its attention or its number of positions does not suit; `segment_length` is
            missing.
    """
    # These import transformers, an optional library.
    from .context_hook import ContextHook
    from .encoder_forward import EncoderForward
    from .patch_model import install
    from .recurrent_layers import recurrent_hooks
    from .segmented_forward import DecoderForward

    stream = found[0][1].stream
    assert stream is not None
    title, segment_length = type(model).__name__, sizes.get("segment_length")
    if segment_length is not None and not stream.cuts:
        raise ValueError(
            f"segment_length={segment_length} is for texts; {title} reads one image a call, which is one segment; "
            "leave it out"
        )
    least = 1 if stream.causal else 2  # each segment of an encoder begins with the row's first token
    at_least_one(", or None for one segment a call", least=least, segment_length=segment_length)
    body = (_decoder if stream.causal else _encoder)(model, [site for site, _ in found])
    refuse_second(model, body, *(site.layer for site, _ in found))
    recurrent = recurrent_hooks(body) if stream.causal else []
    spanning, layers = build_memories(model, body, found, name, settings)
    longest = min((h.stream.longest for _, h in found if h.stream and h.stream.longest), default=None)
    extra = _extra_tokens(spanning, body, stream)
    total = (segment_length or 1) + extra
    if longest is not None and total > longest:
        tokens = f"segment_length={segment_length}" + (f" and {extra} memory tokens" if extra else "")
        raise ValueError(f"{tokens}: {total} positions are needed, {title} has {longest}")
    needs = frozenset().union(*(memory.needs for memory in (spanning, *layers) if memory is not None))
    if "segment_length" not in sizes and "state" in needs and stream.cuts:
        tokens = str(USUAL_LENGTH if longest is None else min(USUAL_LENGTH, longest - extra))
        raise ValueError(
            f"segment_length is missing: memory {name!r} is written after each segment, so that a call of one segment "
            f"would neither read nor train it; give add_memory segment_length={tokens}, or fewer tokens than your rows "
            "have, or segment_length=None for one segment a call, between which you carry memory_state yourself"
        )
    _refuse_window(name, title, found, spanning, segment_length, extra)
    windows = any(memory.window() is not None for memory in layers)
    kind = ContextHook if windows or needs & {"context"} else MemoryHook
    everywhere = needs & {"context", "layer_traces", "slots_in_front"}
    hooks: list[MemoryHook] = []
    for (site, host), memory in zip(found, layers, strict=True):
        if memory.needs or (spanning is not None and everywhere):
            hooks.append(kind(site, host, len(hooks)))
            hooks[-1].install(memory)
    if spanning is not None:
        body.memory = spanning
    given = (body, hooks, spanning is not None, segment_length)
    forward = DecoderForward(*given) if stream.causal else EncoderForward(*given, stream)
    forward.recurrent = recurrent
    for layer in recurrent:
        layer.tracked.follow()
    install(model, forward)


def _decoder(model: nn.Module, sites: list[Site]) -> Any:
    """The module that embeds tokens and has the layers."""
    find: Any = getattr(model, "get_decoder", None)  # OPT's is inside its base model, and called past it
    decoder = None if find is None else find()
    if decoder is None or not hasattr(decoder, "get_input_embeddings"):
        raise ValueError(
            f"{type(model).__name__} is no model of transformers that takes memory_state and returns it; give "
            "add_memory the model of transformers inside"
        )
    for module in (decoder, model):
        parameters = inspect.signature(type(module).forward).parameters.values()
        if all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters):
            raise ValueError(f"{type(module).__name__}.forward takes no further keywords, as the state would be")
    return decoder


def _encoder(model: nn.Module, sites: list[Site]) -> Any:
    """The module that embeds a text or an image and has the layers."""
    encoder: Any = sites[0].holder("embeddings")
    one = all(site.holder("embeddings") is encoder for site in sites)
    if not one or not hasattr(model, "config") or not hasattr(encoder, "get_input_embeddings"):
        raise ValueError(
            f"{type(model).__name__} is no model of transformers around one encoder that takes memory_state and "
            "returns it; give add_memory the encoder inside"
        )
    if hasattr(type(model), "_expand_inputs_for_generation"):
        raise ValueError(
            f"{type(model).__name__} generates text, which an encoder with a memory does not; give it another head"
        )
    return encoder


def _refuse_window(
    name: str, title: str, found: list[tuple[Site, Host]], spanning: ModelMemory | None, length: int | None, extra: int
) -> None:
    """Raise ValueError if the memory's attention mask would replace a sliding window that hides tokens."""
    window = min((h.stream.window for _, h in found if h.stream and h.stream.window), default=None)
    if spanning is None or "bias" not in spanning.needs or window is None:
        return
    if "context" in spanning.needs and "tokens_round" not in spanning.needs:
        return  # its mask is one of slots, beside the window
    if length is None or length + extra > window:
        shorter = f"take segment_length={window - extra} or less, from which it hides nothing, or " * (window > extra)
        raise ValueError(
            f"memory {name!r} gives an attention mask, which would replace {title}'s sliding window of {window} "
            f"tokens; {shorter or 'take '}the memory's mask='causal'"
        )


@torch.no_grad()
def _extra_tokens(memory: ModelMemory | None, body: Any, stream: Stream) -> int:
    """Positions that the memory's tokens take; 0 in encoders, where they join after the embedding modules.

    Raises:
        ValueError: the memory does not give the segment's place among them, or has some after an encoder's text.
    """
    from .host_forward import extra_tokens

    if memory is None:
        return 0
    like = next(body.parameters())
    token = Tokens(like.new_zeros(1, 1, body.config.hidden_size), like.new_zeros(1, 1, 1, dtype=torch.long))
    added, front = extra_tokens(enter_segment(memory, memory.init_state(1, like), token, ()), 1, memory)
    if stream.causal:
        return max(memory.extra_tokens, added)
    if added > front and stream.cuts:
        raise ValueError(
            f"memory {type(memory).__name__} puts tokens after a text, where the padding of shorter rows is between; "
            "in an encoder tokens before it see the whole segment, too: take place='front'"
        )
    return 0
