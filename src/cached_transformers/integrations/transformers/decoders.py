"""Adapters for transformers' decoders. Imports nothing of transformers.

A memory gets queries and keys without positions. Where the layer normalises them before it rotates them, the memory
gets them normalised, as the layer compares them; where it normalises rotated ones (HunYuan), as projected.

Legend: B rows, N tokens, H heads, G heads of keys, E head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from cached_transformers.integrations.hosts import Host, Site, StoredStates, Stream, register_adapter
from cached_transformers.interfaces.memory import Query

from .adapter_utils import (
    TAKE_MASKS,
    config_of,
    first_of,
    in_transformers,
    lowered,
    lowered_by_mask,
    no_masks,
    softmax_of,
    stored,
    turned_in_pairs,
    unturned,
)
from .add_stateful_memory import add_stream_memory

BY_TOKEN = frozenset({"state", "head"})
"""Offers of a causal layer to its memory: queries, keys and values of the segment."""
SPANNING = frozenset({"state", "tokens_round", "slots_in_front", "layer_traces"})
"""Offers of a causal model to a model-level memory."""
BESIDE = frozenset({"context"})
"""Offers of a layer that can attend more than its segment."""
TABLE = (
    "its positions are a table added to the tokens, so that stored states would have positions of the segment that "
    "reads them; take a decoder with rotary positions (Llama, Mistral, Qwen, Gemma, Phi, ...) or alibi (BLOOM)"
)
"""Reason why a layer cannot attend hidden states of earlier segments."""


def causal_host(
    site: Site,
    projection: nn.Module,
    sources: tuple[tuple[nn.Module, ...], ...],
    split: Callable[..., tuple[Tensor | None, Tensor, Tensor]],
    *,
    head_width: int | None = None,
    ends: bool = False,
    masks: bool = True,
    between: Callable[[Tensor], Tensor] | None = None,
    beside: StoredStates | str = TABLE,
    block: nn.Module | None = None,
    groups: int | None = None,
) -> Host:
    """The description of a decoder.

    Args:
        projection: of the merged heads. sources, split, between: see `Stream`.
        head_width: E, where it is not the model's width divided by the number of heads.
        ends: whether positions are a table, which ends.
        masks: whether the model takes attention masks.
        beside: how the layer attends hidden states of earlier segments, or why it does not.
        block: the module around the layer; the one that holds it when None.
        groups: heads of keys and values; as many as of queries when None.
    """
    layer: Any = site.layer
    config = config_of(site)
    width, heads = int(config.hidden_size), int(config.num_attention_heads)
    merged = heads * (head_width or width // heads)
    index = getattr(layer, "layer_idx", getattr(layer, "layer_id", None))
    kind = config._attn_implementation
    lacks: dict[str, str] = {}
    if kind not in TAKE_MASKS:
        lacks = dict.fromkeys(("bias", *BESIDE), no_masks(kind))
    lacks["weights"] = f"attn_implementation={kind!r} gives none; call model.set_attn_implementation('eager')"
    if isinstance(beside, str):
        lacks.update(dict.fromkeys((*BESIDE, "weights", "stored_kv"), beside))
    attends = BESIDE if kind in TAKE_MASKS and not isinstance(beside, str) else frozenset()
    if attends and kind == "eager":
        attends |= {"weights"}
    if groups not in (None, heads):
        lacks["stored_kv"] = f"its {heads} heads of queries share {groups} of keys"
    elif merged != width:
        lacks["stored_kv"] = f"its heads together are {merged} wide, its inputs {width}"
    elif attends:
        attends |= {"stored_kv"}
    takes = frozenset({"bias"}) if kind in TAKE_MASKS and masks else frozenset()
    return Host(
        merged,
        heads,
        projection,
        Query,
        {"index": index, "depth": config.num_hidden_layers, "relative": False},
        attention=softmax_of(site, causal=True),
        offers=BY_TOKEN | attends | (frozenset({"bias"}) if attends else frozenset()),
        lacks=lacks,
        channels=width,
        stream=Stream(
            add_stream_memory,
            site.parent() if block is None else block,
            sources,
            split,
            between,
            longest=int(config.max_position_embeddings) if ends else None,
            offers=SPANNING | attends | takes,
            window=_window(layer, config),
            stored=None if isinstance(beside, str) else beside,
        ),
    )


def _window(layer: Any, config: Any) -> int | None:
    """Number of tokens that a token of this layer sees, itself included; None where it sees all before it."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[layer.layer_idx] != "sliding_attention":
        return None
    window = getattr(layer, "sliding_window", getattr(config, "sliding_window", None))
    return None if window is None else int(window)


def _by_heads(t: Tensor, head_width: int, heads_first: bool) -> Tensor:
    """(B, H, N, E) of (B, N, H * E) or (B, N, H, E); `heads_first`: 4 dimensions are (B, H, N, E) already."""
    if t.dim() == 3:
        t = t.unflatten(-1, (-1, head_width))
    elif heads_first:
        return t
    return t.transpose(1, 2)


def _with_heads(head_width: int, heads_first: bool, t_BND: Tensor) -> Tensor:
    """(B, N, H, E), or (B, H, N, E)."""
    t_BNHE = t_BND.unflatten(-1, (-1, head_width))
    return t_BNHE.transpose(1, 2) if heads_first else t_BNHE


def _split(
    head_width: int, heads_first: bool, limit: float | None, q: Tensor | None, k: Tensor, v: Tensor
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Queries, keys and values of the projections' outputs, which OLMo limits."""
    if limit is not None:
        q, k, v = (None if t is None else t.clamp(-limit, limit) for t in (q, k, v))  # type: ignore[assignment]
    k, v = (_by_heads(t, head_width, heads_first) for t in (k, v))
    return None if q is None else _by_heads(q, head_width, heads_first), k, v


def _separate(
    site: Site, *, norms_heads_first: bool = False, beside: StoredStates | str | None = None, **more: Any
) -> Host:
    """A layer with separate projections.

    Args:
        norms_heads_first: whether its norms of queries and keys get heads before tokens.
        beside: as of `causal_host`; rotary positions when None.
    """
    layer, config = site.layer, config_of(site)
    heads = int(config.num_attention_heads)
    head_width = int(getattr(layer, "head_dim", config.hidden_size // heads))
    q_norm, k_norm = (first_of(layer, f"{name}_norm", f"{name}_layernorm") for name in "qk")
    chains = ((layer.q_proj, q_norm), (layer.k_proj, k_norm), (layer.v_proj, None))
    # A norm of all heads together (OLMo 2) gets the projection's output as it is.
    together = heads > 1 and getattr(getattr(q_norm, "weight", None), "shape", None) == (heads * head_width,)
    limit = getattr(config, "clip_qkv", None)
    return causal_host(
        site,
        first_of(layer, "o_proj", "out_proj", "dense"),
        tuple((projection,) if norm is None else (projection, norm) for projection, norm in chains),
        partial(_split, head_width, norms_heads_first, limit),
        head_width=head_width,
        groups=int(getattr(config, "num_key_value_heads", None) or heads),
        between=None if together else partial(_with_heads, head_width, norms_heads_first),
        beside=stored(site) if beside is None else beside,
        **more,
    )


@register_adapter(
    *in_transformers(
        "arcee.ArceeAttention",
        "cohere.CohereAttention",
        "ernie4_5.Ernie4_5Attention",
        "ernie4_5_moe.Ernie4_5_MoeAttention",
        "gemma.GemmaAttention",
        "gemma2.Gemma2Attention",
        "glm.GlmAttention",
        "glm4.Glm4Attention",
        "gpt_oss.GptOssAttention",
        "granite.GraniteAttention",
        "granitemoe.GraniteMoeAttention",
        "granitemoeshared.GraniteMoeSharedAttention",
        "helium.HeliumAttention",
        "jais2.Jais2Attention",
        "llama.LlamaAttention",
        "ministral.MinistralAttention",
        "ministral3.Ministral3Attention",
        "mistral.MistralAttention",
        "mixtral.MixtralAttention",
        "nemotron.NemotronAttention",
        "olmo.OlmoAttention",
        "olmo2.Olmo2Attention",
        "olmo3.Olmo3Attention",
        "olmoe.OlmoeAttention",
        "phimoe.PhimoeAttention",
        "qwen2.Qwen2Attention",
        "qwen2_moe.Qwen2MoeAttention",
        "qwen3.Qwen3Attention",
        "qwen3_moe.Qwen3MoeAttention",
        "seed_oss.SeedOssAttention",
        "starcoder2.Starcoder2Attention",
    )
)
def rotary_attention(site: Site) -> Host:
    """Llama and its like: rotary positions, perhaps fewer heads of keys and values, perhaps norms of queries and keys
    (Qwen3: per head; OLMo 2: of all heads), perhaps a sliding window."""
    return _separate(site)


@register_adapter(
    *in_transformers(
        "gemma3.Gemma3Attention",
        "phi.PhiAttention",
        "stablelm.StableLmAttention",
    )
)
def heads_first_attention(site: Site) -> Host:
    """`rotary_attention` with norms that get heads before tokens."""
    return _separate(site, norms_heads_first=True)


@register_adapter(*in_transformers("cohere2.Cohere2Attention", "smollm3.SmolLM3Attention"))
def sometimes_rotary_attention(site: Site) -> Host:
    """Cohere 2 and SmolLM 3: some layers have no positions."""
    layer = site.layer
    turns = layer.use_rope if hasattr(layer, "use_rope") else layer.sliding_window is not None
    return _separate(site, beside=stored(site) if turns else stored(site, unturned))


@register_adapter(*in_transformers("exaone4.Exaone4Attention"))
def exaone4_attention(site: Site) -> Host:
    """EXAONE 4: beside layers with a sliding window, those without it have no positions."""
    layer = site.layer
    turns = layer.sliding_window is None or layer.is_sliding
    return _separate(site, norms_heads_first=True, beside=stored(site) if turns else stored(site, unturned))


@register_adapter(*in_transformers("hunyuan_v1_dense.HunYuanDenseV1Attention"))
def hunyuan_attention(site: Site) -> Host:
    """HunYuan: norms of rotated queries and keys, whose weights see absolute positions."""
    why = (
        "it normalises rotated keys, so that more than their distance counts; take another decoder "
        "with rotary positions (Llama, Mistral, Qwen, ...)"
    )
    return _separate(site, beside=why)


@register_adapter(*in_transformers("gptj.GPTJAttention"))
def gptj_attention(site: Site) -> Host:
    """GPT-J: rotary positions from a table, which ends."""
    return _separate(site, ends=True, beside=stored(site, turned_in_pairs))


@register_adapter(*in_transformers("opt.OPTAttention", "gpt_neo.GPTNeoSelfAttention"))
def learned_positions_attention(site: Site) -> Host:
    """OPT and GPT-Neo: learned positions, which end. GPT-Neo's local layers mask distant tokens themselves."""
    block = site.parent() if type(site.layer).__name__.startswith("OPT") else site.parent(2)
    host, config = _separate(site, ends=True, beside=TABLE, block=block), config_of(site)
    if getattr(config, "word_embed_proj_dim", config.hidden_size) != config.hidden_size:
        # Tokens of a memory would leave the model through another projection than they entered.
        assert host.stream is not None
        host.stream = replace(host.stream, offers=frozenset())
    return host


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
            "add_cross_attention=True: a decoder that attends an encoder takes no memory; a GPT-2 without one does"
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
        host.refusal = "add_cross_attention=True: a decoder that attends an encoder takes no memory"
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
    """GPT-NeoX and Pythia: the query, key and value of one head after those of another."""
    layer = site.layer
    split = partial(_by_head, int(layer.config.num_attention_heads))
    return causal_host(site, layer.dense, ((layer.query_key_value,),), split, beside=stored(site))


@register_adapter(*in_transformers("bloom.BloomAttention"))
def bloom_attention(site: Site) -> Host:
    """BLOOM: laid out as GPT-NeoX. Its alibi is made of the padding mask, so that it takes no other mask."""
    layer, split = site.layer, partial(_by_head, int(site.layer.num_heads))
    host = causal_host(
        site, layer.dense, ((layer.query_key_value,),), split, masks=False, beside=stored(site, slope=lowered)
    )
    if layer.pretraining_tp > 1 and layer.slow_but_exact:
        host.refusal = (
            f"slow_but_exact=True with pretraining_tp={layer.pretraining_tp} multiplies by slices of the output "
            "projection, which leave no place for a memory; set config.slow_but_exact=False"
        )
    return host


@register_adapter(*in_transformers("falcon.FalconAttention"))
def falcon_attention(site: Site) -> Host:
    """Falcon: one head of keys for all queries (7B), one for each group of them (40B), or one for each; rotary
    positions, or alibi, which is made of the padding mask, so that it takes no other mask."""
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
