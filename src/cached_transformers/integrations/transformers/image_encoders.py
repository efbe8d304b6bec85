"""Adapters for transformers' attention layers: ViT and BERT; other families have files of their own. Imports nothing of
transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from cached_transformers.checks import insist
from cached_transformers.integrations.hosts import WHOLE, Host, HostAttention, Site, register_adapter
from cached_transformers.integrations.masks import MASKED, map_size, no_mask, padding_of
from cached_transformers.seam.memory import Query


@register_adapter("transformers.models.vit.modeling_vit.ViTAttention")
def vit_attention(site: Site) -> Host:
    """ViT: one class token in front of the grid of patches, a slot for every token."""
    layer, config = site.layer, site.layer.config
    image, patch = _pair(config.image_size), _pair(config.patch_size)
    grid = (image[0] // patch[0], image[1] // patch[1])
    facts = {"length": grid[0] * grid[1] + 1, "size": grid, "prefix": 1}
    attention, query = softmax_of(config, layer.attention_dropout), partial(_vit_query, grid)
    return Host(config.hidden_size, config.num_attention_heads, layer.o_proj, query, facts, attention=attention)  # type: ignore[arg-type]


def _vit_query(grid: tuple[int, int], hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Query:
    if attention_mask is not None and torch.compiler.is_compiling():
        # Traced code gets a mask even where nothing is hidden; whether that is so, only a run can tell.
        visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask >= 0
        insist(visible.all(), MASKED)
    else:
        no_mask(attention_mask)
    return Query(hidden_states, size=map_size(hidden_states.shape[1], 1, grid))


@register_adapter("transformers.models.bert.modeling_bert.BertSelfAttention")
def bert_attention(site: Site) -> Host:
    """BERT as an encoder: each row's valid tokens are spread over the slots."""
    layer, config = site.layer, site.layer.config
    return Host(
        config.hidden_size,
        config.num_attention_heads,
        site.parent().output.dense,  # type: ignore[union-attr, arg-type]
        _bert_query,
        # A decoder takes no memory, whatever its length.
        {"length": 0 if layer.is_decoder else site.length(config.max_position_embeddings)},
        attention=softmax_of(config, layer.dropout.p, causal=layer.is_decoder),
        offers=WHOLE,
        refusal="BERT with is_decoder=True is causal, and has no place for a state" if layer.is_decoder else None,
    )


def _bert_query(hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Query:
    return Query(hidden_states, padding_BN=padding_of(attention_mask, hidden_states.shape[1]))


def softmax_of(config: Any, dropout: float, causal: bool = False, bias: bool = False) -> HostAttention:
    """The attention of a layer that looks its implementation up in transformers. Its mask tells the padding, unless a
    `bias` on the logits is part of it."""
    kind = config._attn_implementation
    refusal = None
    if kind != "sdpa":
        refusal = (
            f"with attn_implementation={kind!r} there is no scaled_dot_product_attention to exchange; "
            "call model.set_attn_implementation('sdpa') first"
        )
    asks = frozenset({"causal" if causal else "bidirectional", *(("bias",) if bias else ())})
    return HostAttention(asks, float(dropout), padding=not bias, refusal=refusal)


def _pair(value: Any) -> tuple[int, int]:
    return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[1]))
