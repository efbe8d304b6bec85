"""Memories with a state in transformers' decoders: the state is given in and comes back.

    out = model(input_ids, memory_state=state);   state = out.memory_state

It is to segments what `past_key_values` is to tokens. `segment_reader.py` reads, `stream_tap.py` lets a memory into a
layer, `memory_calls.py` takes the state through the model's forward and `generate`.

A layer memory that mixes a result of its own into the heads finds its queries, keys and values here, one that keeps
hidden states has them attended beside the segment (`context_tap.py`), and a memory that spans the layers goes through
them as a stack would let it: any that needs no more works, whoever registered it.

Recurrent Memory Transformer on a pretrained decoder: arXiv:2207.06881; original: github.com/booydar/LM-RMT, whose
tokens round the segment enter as `inputs_embeds` too, and whose memory is the output behind the host's final norm.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from cached_transformers.integrations.hosts import Host, Site, refuse_memory
from cached_transformers.integrations.taps import layer_memory, settled, spans_layers
from cached_transformers.memories import create_memory
from cached_transformers.seam.memory import LayerMemory, ModelMemory, Tokens

from .context_tap import ContextTap
from .stream_tap import StreamTap
from .through_host import place_of_segment

USUAL_LENGTH = 256
"""Tokens in a segment that are suggested where the model has positions for them."""


def add_stream_memory(
    model: nn.Module,
    found: list[tuple[Site, Host]],
    name: str,
    settings: dict[str, Any],
    **sizes: Any,
) -> None:
    """Give a decoder of transformers a memory, in place.

    Args:
        sizes: `segment_length`, which a memory with a state cannot do without: tokens, or None for one segment a call.

    Raises:
        ValueError: the memory, the model, its attention or its number of positions does not suit, or there is no word
            of the segments.
    """
    from .memory_calls import attach_calls  # which imports transformers, an optional library
    from .segment_reader import SegmentReader

    if sizes.get("input_size") is not None:
        raise ValueError(f"input_size={sizes['input_size']} is for images, which {type(model).__name__} does not read")
    segment_length: int | None = sizes.get("segment_length")
    decoder = _decoder(model, [site for site, _ in found])
    if segment_length is not None and segment_length < 1:
        raise ValueError(f"segment_length={segment_length} must be at least 1 token, or None for one segment a call")
    spanning = _spanning(decoder, found[0][1], name, settings) if spans_layers(name) else None
    layers = _layers(found, name, settings, spanning)
    refuse_memory(name, model, [host for _, host in found], layers, spanning)
    longest = min((h.stream.longest for _, h in found if h.stream and h.stream.longest), default=None)
    extra = 0 if spanning is None else max(spanning.extra_tokens, _added_tokens(spanning, decoder))
    if longest is not None and (segment_length or 1) + extra > longest:
        tokens = f"segment_length={segment_length}" + (f" and {extra} memory tokens" if extra else "")
        places = f"{(segment_length or 1) + extra} places"
        raise ValueError(f"{tokens} are {places}, {type(model).__name__} has positions for {longest}")
    needs = frozenset().union(*(memory.needs for memory in (spanning, *layers) if memory is not None))
    if "segment_length" not in sizes and "state" in needs:
        tokens = str(USUAL_LENGTH if longest is None else min(USUAL_LENGTH, longest - extra))
        raise ValueError(
            f"segment_length is missing: memory {name!r} is written behind each segment, so that a call of one segment "
            f"would never read what it wrote, nor train it; give add_memory segment_length={tokens}, or fewer tokens "
            "than your rows have, or segment_length=None for one segment a call, between which you carry memory_state "
            "yourself"
        )
    _refuse_window(name, model, found, spanning, segment_length, extra)
    taps: list[StreamTap] = []
    windows = any(memory.window() is not None for memory in layers)
    tap = ContextTap if windows or needs & {"context", "kv_projection", "layer_traces"} else StreamTap
    for (site, host), memory in zip(found, layers, strict=True):
        if memory.needs or (spanning is not None and tap is ContextTap):
            taps.append(tap(site, host, len(taps)))
            taps[-1].attach(memory, taps[-1].before_stream)
    if spanning is not None:
        decoder.memory = spanning
    attach_calls(model, decoder, SegmentReader(decoder, taps, spanning is not None, segment_length))


def _decoder(model: nn.Module, places: list[Site]) -> Any:
    """The module that embeds tokens and has the layers."""
    find: Any = getattr(model, "get_decoder", None)  # OPT's is inside its base model, and called past it
    decoder = None if find is None else find()
    if decoder is None or not hasattr(decoder, "get_input_embeddings"):
        raise ValueError(
            f"{type(model).__name__} is no model of transformers, which could take memory_state and return it; give "
            "add_memory the model of transformers inside"
        )
    if any("memory_detach" in vars(module) for module in (decoder, model, *(site.layer for site in places))):
        raise ValueError(f"{type(model).__name__} has a memory already; call remove_memory(model) first")
    for module in (decoder, model):
        parameters = inspect.signature(type(module).forward).parameters.values()
        if all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters):
            raise ValueError(f"{type(module).__name__}.forward passes no keywords on, by which the state would travel")
    return decoder


def _refuse_window(
    name: str,
    model: nn.Module,
    found: list[tuple[Site, Host]],
    spanning: ModelMemory | None,
    segment_length: int | None,
    extra: int,
) -> None:
    """A mask of who sees whom takes the place of a sliding window, which therefore must not hide anything.

    Raises:
        ValueError: it would.
    """
    window = min((h.stream.window for _, h in found if h.stream and h.stream.window), default=None)
    if spanning is None or "bias" not in spanning.needs or window is None:
        return
    if "context" in spanning.needs and "tokens_round" not in spanning.needs:
        return  # its mask is one of slots, which stands beside the window
    if segment_length is None or segment_length + extra > window:
        shorter = f"take segment_length={window - extra} or less, from which it hides nothing, or " * (window > extra)
        raise ValueError(
            f"memory {name!r} gives a mask of who sees whom, where {type(model).__name__} has a sliding window of "
            f"{window} tokens; {shorter or 'take '}the memory's mask='causal'"
        )


def _spanning(decoder: Any, host: Host, name: str, settings: dict[str, Any]) -> ModelMemory:
    like = next(decoder.parameters())
    # What comes out of the decoder went through its final norm.
    facts = {"causal": True, "norm": "post", "depth": host.facts.get("depth"), "relative": host.facts.get("relative")}
    memory = create_memory({"name": name, **settings}, decoder.config.hidden_size, host.heads, **facts)
    assert isinstance(memory, ModelMemory)
    return memory.to(like.device, like.dtype).train(decoder.training)


def _layers(
    found: list[tuple[Site, Host]], name: str, settings: dict[str, Any], spanning: ModelMemory | None
) -> list[LayerMemory]:
    """The memory of each layer."""
    if spanning is None:
        return [layer_memory(site, host, name, settings) for site, host in found]
    layers = [spanning.layer_memory(index) for index in range(len(found))]
    return [settled(layer, site) for layer, (site, _) in zip(layers, found, strict=True)]


@torch.no_grad()
def _added_tokens(memory: ModelMemory, decoder: Any) -> int:
    """How many tokens the memory puts round a segment of one.

    Raises:
        ValueError: it does not say where the segment stands among them.
    """
    like = next(decoder.parameters())
    token = Tokens(like.new_zeros(1, 1, decoder.config.hidden_size), like.new_zeros(1, 1, 1, dtype=torch.long))
    return place_of_segment(memory.enter(memory.init_state(1, like), token), 1, memory)[0]
