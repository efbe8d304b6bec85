"""Adapters for transformers' GPT-2 and Llama, which take memories with a state. Imports nothing of transformers.

Legend: B rows, N tokens, H heads, G heads of keys, E head width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from cached_transformers.integrations.hosts import Host, Site, Stream, register_adapter
from cached_transformers.seam.memory import Query

from .image_encoders import softmax_of
from .streams import TAKE_MASKS, add_stream_memory

BY_TOKEN = frozenset({"state", "head"})
"""What a causal layer offers a memory of its own: it gives queries, keys and values of the segment."""


@register_adapter("transformers.models.gpt2.modeling_gpt2.GPT2Attention")
def gpt2_attention(site: Site) -> Host | None:
    """GPT-2: one projection for queries, keys and values; learned positions, which end."""
    layer, config = site.layer, site.layer.config
    if layer.is_cross_attention:
        return None
    refusal = "add_cross_attention=True: a decoder that attends an encoder, too, takes no memory; a GPT-2 alone does"
    split, longest = partial(_fused_heads, layer.num_heads), int(config.max_position_embeddings)
    return Host(
        layer.embed_dim,
        layer.num_heads,
        layer.c_proj,
        Query,
        {"index": layer.layer_idx, "depth": config.num_hidden_layers},
        attention=softmax_of(config, layer.attn_dropout.p, causal=True),
        offers=BY_TOKEN,
        refusal=refusal if config.add_cross_attention else None,
        stream=Stream(add_stream_memory, (layer.c_attn,), split, longest, _of_the_model(config)),
    )


@register_adapter("transformers.models.llama.modeling_llama.LlamaAttention")
def llama_attention(site: Site) -> Host:
    """Llama: rotary positions, and perhaps fewer heads of keys and values, each of which several queries share."""
    layer, config = site.layer, site.layer.config
    heads = int(config.num_attention_heads)
    sources, split = (layer.q_proj, layer.k_proj, layer.v_proj), partial(_grouped_heads, heads, layer.head_dim)
    return Host(
        heads * layer.head_dim,
        heads,
        layer.o_proj,
        Query,
        {"index": layer.layer_idx, "depth": config.num_hidden_layers},
        attention=softmax_of(config, layer.attention_dropout, causal=True),
        offers=BY_TOKEN,
        channels=int(config.hidden_size),
        stream=Stream(add_stream_memory, sources, split, offers=_of_the_model(config)),
    )


def _of_the_model(config: Any) -> frozenset[str]:
    """What a decoder offers a memory that spans its layers; not every implementation of its attention takes masks."""
    masks = {"bias"} if config._attn_implementation in TAKE_MASKS else set()
    return frozenset({"state", "tokens_round", *masks})


def _fused_heads(heads: int, qkv_BNL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in qkv_BNL.chunk(3, -1))
    return q, k, v


def _grouped_heads(
    heads: int, head_width: int, q_BNL: Tensor, k_BNL: Tensor, v_BNL: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (t.unflatten(-1, (-1, head_width)).transpose(1, 2) for t in (q_BNL, k_BNL, v_BNL))
    k, v = (t_BGNE.repeat_interleave(heads // t_BGNE.shape[1], 1) for t_BGNE in (k, v))
    return q, k, v
