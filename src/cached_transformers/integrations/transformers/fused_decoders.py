"""Adapters for transformers' decoders with one projection for queries, keys and values. Imports nothing of
transformers.

Each says how the outputs of its projection are laid out; queries and keys are those without positions.

Legend: B rows, N tokens, H heads, G heads of keys, E head width.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from cached_transformers.integrations.hosts import Host, Site, register_adapter

from .config_utils import config_of, in_transformers
from .decoders import causal_host
from .rotary import lowered, lowered_by_mask, stored


@register_adapter(*in_transformers("gpt2.GPT2Attention"))
def gpt2_attention(site: Site) -> Host | None:
    """GPT-2: learned positions, which end."""
    layer, config = site.layer, site.layer.config
    if layer.is_cross_attention:
        return None
    host = causal_host(
        site, layer.c_proj, ((layer.c_attn,),), partial(_blocks, layer.num_heads, layer.num_heads), ends=True
    )
    if config.add_cross_attention:
        host.refusal = (
            "add_cross_attention=True: a decoder that attends an encoder, too, takes no memory; a GPT-2 alone does"
        )
    return host


@register_adapter(*in_transformers("gpt_bigcode.GPTBigCodeAttention"))
def gpt_bigcode_attention(site: Site) -> Host | None:
    """GPT-BigCode (SantaCoder, StarCoder): one head of keys for all queries, or one for each; learned positions."""
    layer, config = site.layer, site.layer.config
    if layer.is_cross_attention:
        return None
    heads = int(config.num_attention_heads)
    split = partial(_blocks, heads, 1) if layer.multi_query else partial(_by_head, heads)
    host = causal_host(site, layer.c_proj, ((layer.c_attn,),), split, ends=True)
    if config.add_cross_attention:
        host.refusal = "add_cross_attention=True: a decoder that attends an encoder, too, takes no memory"
    return host


@register_adapter(*in_transformers("phi3.Phi3Attention"))
def phi3_attention(site: Site) -> Host:
    """Phi-3: all queries, all keys, all values; perhaps fewer heads of keys."""
    layer, config = site.layer, site.layer.config
    split = partial(_blocks, int(config.num_attention_heads), int(config.num_key_value_heads))
    return causal_host(
        site,
        layer.o_proj,
        ((layer.qkv_proj,),),
        split,
        head_width=int(layer.head_dim),
        beside=stored(site),
        groups=int(config.num_key_value_heads),
    )


@register_adapter(*in_transformers("gpt_neox.GPTNeoXAttention"))
def gpt_neox_attention(site: Site) -> Host:
    """GPT-NeoX and Pythia: the queries, keys and values of one head after those of another."""
    layer = site.layer
    split = partial(_by_head, int(layer.config.num_attention_heads))
    return causal_host(site, layer.dense, ((layer.query_key_value,),), split, beside=stored(site))


@register_adapter(*in_transformers("bloom.BloomAttention"))
def bloom_attention(site: Site) -> Host:
    """BLOOM: as GPT-NeoX. Its alibi is made of the padding mask, so that no other mask can be given to it."""
    layer, split = site.layer, partial(_by_head, int(site.layer.num_heads))
    host = causal_host(
        site, layer.dense, ((layer.query_key_value,),), split, masks=False, beside=stored(site, slope=lowered)
    )
    if layer.pretraining_tp > 1 and layer.slow_but_exact:
        host.refusal = (
            f"slow_but_exact=True with pretraining_tp={layer.pretraining_tp} multiplies by slices of the output "
            "projection, into which a memory cannot be let; set config.slow_but_exact=False"
        )
    return host


@register_adapter(*in_transformers("falcon.FalconAttention"))
def falcon_attention(site: Site) -> Host:
    """Falcon: one head of keys for all queries (7B), one for each group of them (40B), or one for each; rotary
    positions, or alibi, which is made of the padding mask, so that no other mask can be given to it."""
    layer, heads = site.layer, int(site.layer.num_heads)
    groups = heads
    if layer.new_decoder_architecture:
        groups = int(layer.num_kv_heads)
        split = partial(_by_group, heads, groups)
    elif layer.multi_query:
        groups = 1
        split = partial(_blocks, heads, groups)
    else:
        split = partial(_by_head, heads)
    alibi = bool(config_of(site).alibi)
    beside = stored(site, slope=lowered_by_mask) if alibi else stored(site)
    return causal_host(
        site, layer.dense, ((layer.query_key_value,),), split, masks=not alibi, beside=beside, groups=groups
    )


def _heads(t_BNL: Tensor, heads: int) -> Tensor:
    return t_BNL.unflatten(-1, (heads, -1)).transpose(1, 2)


def _blocks(heads: int, groups: int, qkv_BNL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All queries, all keys, all values."""
    head_width = qkv_BNL.shape[-1] // (heads + 2 * groups)
    sizes = [count * head_width for count in (heads, groups, groups)]
    q, k, v = (_heads(t, n) for t, n in zip(qkv_BNL.split(sizes, -1), (heads, groups, groups), strict=True))
    return q, k, v


def _by_head(heads: int, qkv_BNL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The query, key and value of each head side by side."""
    return _by_group(heads, heads, qkv_BNL)


def _by_group(heads: int, groups: int, qkv_BNL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The queries of each group side by side with their key and value."""
    share = heads // groups
    qkv_BNGSE = qkv_BNL.unflatten(-1, (groups, share + 2, -1))
    q_BNGSE, k_BNGSE, v_BNGSE = qkv_BNGSE.split([share, 1, 1], -2)
    q, k, v = (t.flatten(2, 3).transpose(1, 2) for t in (q_BNGSE, k_BNGSE, v_BNGSE))
    return q, k, v
