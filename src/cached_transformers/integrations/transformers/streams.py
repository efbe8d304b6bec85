"""Memories with a state in transformers' decoders: the state is given in and comes back.

    out = model(input_ids, memory_state=state);   state = out.memory_state

It is to segments what `past_key_values` is to tokens. `segment_reader.py` reads, `stream_tap.py` lets a memory into a
layer, `memory_calls.py` takes the state through the model's forward and `generate`.

Recurrent Memory Transformer on a pretrained decoder: arXiv:2207.06881; original: github.com/booydar/LM-RMT, whose
tokens round the segment enter as `inputs_embeds` too, and whose memory is the output behind the host's final norm.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from cached_transformers.integrations.adapters import layer_memory
from cached_transformers.integrations.hosts import Host, Site
from cached_transformers.memories import create_memory
from cached_transformers.memories.rmt import RMT

from .memory_calls import attach_calls
from .segment_reader import SegmentReader
from .stream_tap import StreamTap, attach_stream

WORKS = ("grc_stream", "memorizing", "rmt")


def add_stream_memory(
    model: nn.Module,
    found: list[tuple[Site, Host]],
    name: str,
    settings: dict[str, Any],
    segment_length: int | None,
) -> None:
    """Give a decoder of transformers a memory with a state, in place.

    Raises:
        ValueError: the memory, the model, its attention or its number of positions does not suit.
    """
    if name not in WORKS:
        raise ValueError(
            f"memory {name!r} does not work in models of others, which offer it neither a place for keys and values "
            f"nor a block of its own; memories with a state that do: {', '.join(WORKS)}"
        )
    decoder = getattr(model, "base_model", None)
    if decoder is None or not hasattr(decoder, "get_input_embeddings"):
        raise ValueError(
            f"{type(model).__name__} is no model of transformers, which could take memory_state and return it; give "
            "add_memory the model of transformers inside"
        )
    for module in (decoder, model):
        if "memory_detach" in vars(module) or any("memory_detach" in vars(site.layer) for site, _ in found):
            raise ValueError(f"{type(model).__name__} has a memory already; call remove_memory(model) first")
        parameters = inspect.signature(type(module).forward).parameters.values()
        if all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters):
            raise ValueError(f"{type(module).__name__}.forward passes no keywords on, by which the state would travel")
    refusal = next((host.stream.refusal for _, host in found if host.stream and host.stream.refusal), None)
    if refusal is not None:
        raise ValueError(refusal)
    if segment_length is not None and segment_length < 1:
        raise ValueError(f"segment_length={segment_length} must be at least 1 token, or None for one segment a call")
    around = _around(decoder, found[0][1], settings) if name == "rmt" else None
    longest = min((h.stream.longest for _, h in found if h.stream and h.stream.longest), default=None)
    needed = (segment_length or 1) + (0 if around is None else around.extra_tokens)
    if longest is not None and needed > longest:
        tokens = f"segment_length={segment_length}" + (
            "" if around is None else f" and {around.extra_tokens} memory tokens"
        )
        raise ValueError(f"{tokens} are {needed} places, {type(model).__name__} has positions for {longest}")
    taps: list[tuple[Site, StreamTap]] = []
    for site, host in found if around is None else ():
        memory = layer_memory(site, host, name, settings)
        if "lse" in memory.needs:
            raise ValueError(
                f"memory {name!r} would share one softmax with the layer (joint=True), whose log-sum-exp transformers' "
                "attention does not give; leave joint=False"
            )
        if memory.needs:
            taps.append((site, StreamTap(memory, host, len(taps))))
    for site, tap in taps:
        attach_stream(site.layer, tap)
    reader = SegmentReader(decoder, [tap for _, tap in taps], around, segment_length)
    if around is not None:
        decoder.memory = around
    attach_calls(model, decoder, reader)


def _around(decoder: Any, host: Host, settings: dict[str, Any]) -> RMT:
    like = next(decoder.parameters())
    memory = create_memory(
        {"name": "rmt", **settings}, decoder.config.hidden_size, host.heads, causal=True, norm="post"
    )
    assert isinstance(memory, RMT)
    if memory.cache:
        raise ValueError("memory 'rmt' with cache=... needs keys and values of its own in every layer; leave it at 0")
    kind = decoder.config._attn_implementation
    if "bias" in memory.needs and kind not in ("eager", "sdpa"):
        raise ValueError(
            f"memory 'rmt' with mask='full' hands attn_implementation={kind!r} a mask that it cannot take; call "
            "model.set_attn_implementation('sdpa'), or give mask='causal'"
        )
    return memory.to(like.device, like.dtype).train(decoder.training)
