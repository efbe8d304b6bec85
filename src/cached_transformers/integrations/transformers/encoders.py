"""Adapters for the encoders of transformers' BART, T5 and SwitchTransformers. Imports nothing of transformers.

An encoder-decoder gets its memory in the encoder alone, as in the paper (arXiv:2312.12742, section 4.3); what is causal
and what attends the encoder's output is left as it is.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cached_transformers.integrations.hosts import WHOLE, Host, Site, register_adapter
from cached_transformers.integrations.masks import padding_of
from cached_transformers.seam.memory import Query

from .image_encoders import softmax_of


@register_adapter("transformers.models.bart.modeling_bart.BartAttention")
def bart_attention(site: Site) -> Host | None:
    """BART's encoder: each row's valid tokens are spread over the slots."""
    layer = site.layer
    if layer.is_decoder:
        return None
    longest = int(layer.config.max_position_embeddings)
    facts = {"length": site.length(longest)}
    attention = softmax_of(layer.config, layer.dropout)
    return Host(layer.embed_dim, layer.num_heads, layer.out_proj, _bart_query, facts, attention=attention, offers=WHOLE)


def _bart_query(hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Query:
    return Query(hidden_states, padding_BN=padding_of(attention_mask, hidden_states.shape[1]))


@register_adapter(
    "transformers.models.t5.modeling_t5.T5Attention",
    "transformers.models.switch_transformers.modeling_switch_transformers.SwitchTransformersAttention",
)
def t5_attention(site: Site) -> Host | None:
    """T5's and Switch's encoder. Heads may be wider or narrower together than the model."""
    layer = site.layer
    if layer.is_decoder:
        return None
    facts = {"length": site.length()}
    attention = softmax_of(layer.config, layer.dropout, bias=True)
    return Host(
        *(layer.inner_dim, layer.n_heads, layer.o, _t5_query, facts),
        attention=attention,
        offers=WHOLE,
        channels=layer.d_model,
    )


def _t5_query(hidden_states: Tensor, mask: Tensor | None = None, **_: Any) -> Query:
    return Query(hidden_states, padding_BN=padding_of(mask, hidden_states.shape[1]))
