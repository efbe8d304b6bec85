"""Memories with a state in transformers' models: the state is given in and comes back.

    out = model(input_ids, memory_state=state);   state = out.memory_state

It is to segments what `past_key_values` is to tokens. `segment_reader.py` reads for decoders, `encoder_reader.py` for
encoders of texts and images; `stream_tap.py` lets a memory into a layer, `memory_calls.py` takes the state through the
model's forward and `generate`.

A layer memory that mixes a result of its own into the heads finds its queries, keys and values here, one that keeps
hidden states has them attended beside the segment (`context_tap.py`), and a memory that spans the layers goes through
them as a stack would let it: any that needs no more works, whoever registered it.

Recurrent Memory Transformer on a pretrained decoder: arXiv:2207.06881; original: github.com/booydar/LM-RMT, whose
tokens round the segment enter as `inputs_embeds` too, and whose memory is the output behind the host's final norm.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from cached_transformers.integrations.hosts import Host, Site, Stream, refuse_memory
from cached_transformers.integrations.memory_hooks import (
    MemoryHook,
    give_slot_attentions,
    layer_memory,
    settled,
    spans_layers,
)
from cached_transformers.interfaces.memory import LayerMemory, ModelMemory, Tokens, begin
from cached_transformers.memories import create_memory
from cached_transformers.registry import MEMORIES

USUAL_LENGTH = 256
"""Tokens in a segment that are suggested where the model has positions for them."""


def add_stream_memory(
    model: nn.Module,
    found: list[tuple[Site, Host]],
    name: str,
    settings: dict[str, Any],
    **sizes: Any,
) -> None:
    """Give a model of transformers a memory with a state, in place.

    Args:
        sizes: `segment_length`, which a memory with a state cannot do without where there are tokens: so many, or None
            for one segment a call. An image is a segment.

    Raises:
        ValueError: the memory, the model, its attention or its number of positions does not suit, or there is no word
            of the segments.
    """
    # These import transformers, an optional library.
    from .context_hook import ContextHook
    from .encoder_forward import EncoderForward
    from .patch_model import install
    from .segmented_forward import DecoderForward

    stream = found[0][1].stream
    assert stream is not None
    segment_length: int | None = sizes.get("segment_length")
    check_sizes(model, stream, **sizes)
    body = (_decoder if stream.causal else _encoder)(model, [site for site, _ in found])
    spanning = spanning_of(body, found, name, settings) if spans_layers(name) else None
    layers = layers_of(found, name, settings, spanning)
    refuse_memory(name, model, [host for _, host in found], layers, spanning)
    longest = min((h.stream.longest for _, h in found if h.stream and h.stream.longest), default=None)
    extra = _extra_tokens(spanning, body, stream)
    if longest is not None and (segment_length or 1) + extra > longest:
        tokens = f"segment_length={segment_length}" + (f" and {extra} memory tokens" if extra else "")
        places = f"{(segment_length or 1) + extra} places"
        raise ValueError(f"{tokens} are {places}, {type(model).__name__} has positions for {longest}")
    needs = frozenset().union(*(memory.needs for memory in (spanning, *layers) if memory is not None))
    if "segment_length" not in sizes and "state" in needs and stream.cuts:
        tokens = str(USUAL_LENGTH if longest is None else min(USUAL_LENGTH, longest - extra))
        raise ValueError(
            f"segment_length is missing: memory {name!r} is written behind each segment, so that a call of one segment "
            f"would never read what it wrote, nor train it; give add_memory segment_length={tokens}, or fewer tokens "
            "than your rows have, or segment_length=None for one segment a call, between which you carry memory_state "
            "yourself"
        )
    _refuse_window(name, model, found, spanning, segment_length, extra)
    windows = any(memory.window() is not None for memory in layers)
    kind = ContextHook if windows or needs & {"context", "kv_projection"} else MemoryHook
    everywhere = needs & {"context", "kv_projection", "layer_traces", "slots_in_front"}
    hooks: list[MemoryHook] = []
    for (site, host), memory in zip(found, layers, strict=True):
        if memory.needs or (spanning is not None and everywhere):
            hooks.append(kind(site, host, len(hooks)))
            hooks[-1].install(memory)
    if spanning is not None:
        body.memory = spanning
    if stream.causal:
        install(model, DecoderForward(body, hooks, spanning is not None, segment_length))
    else:
        install(model, EncoderForward(body, hooks, spanning is not None, segment_length, stream, "state" in needs))


def check_sizes(
    model: nn.Module,
    stream: Stream,
    segment_length: int | None = None,
    input_size: tuple[int, int] | None = None,
) -> None:
    """Refuse sizes that do not go with what the model reads (ValueError)."""
    title, given = type(model).__name__, f"segment_length={segment_length}"
    if input_size is not None:
        why = f"is for images, which {title} does not read" if stream.cuts else f"is known to {title}; leave it out"
        raise ValueError(f"input_size={input_size} {why}")
    if segment_length is None:
        return
    if not stream.cuts:
        raise ValueError(f"{given} is for texts; {title} reads one image a call, which is one segment; leave it out")
    if segment_length < 1:
        raise ValueError(f"{given} must be at least 1 token, or None for one segment a call")
    if segment_length < 2 and not stream.causal:
        raise ValueError(
            f"{given} must be at least 2 tokens in an encoder, where each segment begins with the row's first token, "
            "or None for one segment a call"
        )


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


def _encoder(model: nn.Module, places: list[Site]) -> Any:
    """The module that embeds a text or an image and has the layers."""
    encoder: Any = places[0].holder("embeddings")
    one = all(site.holder("embeddings") is encoder for site in places)
    if not one or not hasattr(model, "config") or not hasattr(encoder, "get_input_embeddings"):
        raise ValueError(
            f"{type(model).__name__} is no model of transformers around one encoder, which could take memory_state and "
            "return it; give add_memory the encoder inside"
        )
    if any("memory_detach" in vars(module) for module in (encoder, model, *(site.layer for site in places))):
        raise ValueError(f"{type(model).__name__} has a memory already; call remove_memory(model) first")
    if hasattr(type(model), "_expand_inputs_for_generation"):
        raise ValueError(
            f"{type(model).__name__} generates text, which an encoder with a memory does not; give it another head"
        )
    return encoder


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


def spanning_of(model: Any, found: list[tuple[Site, Host]], name: str, settings: dict[str, Any]) -> ModelMemory:
    """The memory that spans the layers of a model, on its device, in its dtype and mode."""
    like, host = next(model.parameters()), found[0][1]
    assert host.stream is not None
    # What comes out of the host went through its final norm, what a layer leaves did not.
    norm = "pre" if "layer_traces" in getattr(MEMORIES.entry(name).factory, "needs", ()) else "post"
    facts = {"causal": host.stream.causal, "norm": norm, "depth": host.facts.get("depth", len(found))}
    facts["relative"] = host.facts.get("relative")
    memory = create_memory({"name": name, **settings}, host.channels or host.width, host.heads, **facts)
    assert isinstance(memory, ModelMemory)
    if "slots_in_front" in memory.needs:
        give_slot_attentions(memory, len(found))
    return memory.to(like.device, like.dtype).train(model.training)


def layers_of(
    found: list[tuple[Site, Host]], name: str, settings: dict[str, Any], spanning: ModelMemory | None
) -> list[LayerMemory]:
    """The memory of each layer."""
    places = [(site, host, (index, len(found))) for index, (site, host) in enumerate(found)]
    if spanning is None:
        return [layer_memory(site, _without_slots(host, *place), name, settings) for site, host, place in places]
    layers = [spanning.layer_memory(index) for index in range(len(found))]
    return [settled(layer, site) for layer, (site, _) in zip(layers, found, strict=True)]


def _without_slots(host: Host, index: int, depth: int) -> Host:
    """The layer for a memory with a state: how many slots a shared cache has for its tokens says nothing to it."""
    told = {name: fact for name, fact in host.facts.items() if name not in ("length", "size", "prefix")}
    return replace(host, facts={"index": index, "depth": depth, **told})


@torch.no_grad()
def _extra_tokens(memory: ModelMemory | None, decoder: Any, stream: Stream) -> int:
    """How many of the model's positions tokens of the memory take. Those of an encoder join behind its embeddings, and
    take none.

    Raises:
        ValueError: the memory does not say where the segment stands among them, or has some behind an encoder's text.
    """
    if memory is None:
        return 0
    from .host_forward import extra_tokens

    like = next(decoder.parameters())
    token = Tokens(like.new_zeros(1, 1, decoder.config.hidden_size), like.new_zeros(1, 1, 1, dtype=torch.long))
    added, front = extra_tokens(begin(memory, memory.init_state(1, like), token, ()), 1, memory)
    if stream.causal:
        return max(memory.extra_tokens, added)
    if added > front and stream.cuts:
        raise ValueError(
            f"memory {type(memory).__name__} puts tokens behind a text, where padding of shorter rows would stand "
            "between; in an encoder they see the whole segment from the front, too: take place='front'"
        )
    return 0
