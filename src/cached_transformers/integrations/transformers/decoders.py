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

from cached_transformers.integrations.hosts import Host, Site, StoredStates, Stream, register_recurrent
from cached_transformers.interfaces.memory import Query

from .adapter_utils import (
    TAKE_MASKS,
    adapts,
    by_groups,
    classes_of,
    config_of,
    first_of,
    in_blocks,
    lowered,
    lowered_by_mask,
    no_masks,
    softmax_of,
    stored,
    turned_in_pairs,
    unturned,
)
from .add_stateful_memory import add_stream_memory

BY_TOKEN = frozenset({"state", "head", "queries"})
"""Offers of a causal layer to its memory: queries, keys and values of the segment, and a term for the queries."""
SPANNING = frozenset({"state", "tokens_round", "slots_in_front", "layer_traces"})
"""Offers of a causal model to a model-level memory."""
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
    """The description of a decoder's layer.

    Args:
        projection: of the merged heads. sources, split, between: see `Stream`.
        head_width: E, where it is not the model's width divided by the number of heads.
        ends: positions are a table, which ends. masks: the model takes attention masks.
        beside: how the layer attends hidden states of earlier segments, or why it does not.
        block: the module around the layer; the one that holds it when None.
        groups: heads of keys and values; as many as of queries when None.
    """
    layer, config = site.layer, config_of(site)
    width, heads, kind = int(config.hidden_size), int(config.num_attention_heads), config._attn_implementation
    merged = heads * (head_width or width // heads)
    masked, why = kind in TAKE_MASKS, beside if isinstance(beside, str) else None
    attends: set[str] = set()
    lacks = {} if masked else dict.fromkeys(("bias", "context"), no_masks(kind))
    if why is not None:
        lacks |= dict.fromkeys(("context", "weights", "stored_kv", "turn"), why)
    elif masked:
        more = beside.more  # type: ignore[union-attr]
        attends = {"context", "stored_kv", "turn", *(["weights"] if kind == "eager" or not more else [])}
        lacks["weights"] = more
    kinds, window = getattr(config, "layer_types", None), None
    if kinds is None or kinds[layer.layer_idx] == "sliding_attention":
        window = getattr(layer, "sliding_window", getattr(config, "sliding_window", None))
    index = getattr(layer, "layer_idx", getattr(layer, "layer_id", None))
    stream = Stream(
        *(add_stream_memory, site.parent() if block is None else block, sources, split, between),
        longest=int(config.max_position_embeddings) if ends else None,
        offers=SPANNING | attends | (frozenset({"bias"}) if masked and masks else frozenset()),
        window=None if window is None else int(window),
        stored=None if isinstance(beside, str) else beside,
    )
    facts = {"index": index, "depth": config.num_hidden_layers, "relative": False}
    offers = BY_TOKEN | attends | (frozenset({"bias"}) if attends else frozenset())
    rest: dict[str, Any] = {"offers": offers, "lacks": lacks, "channels": width, "stream": stream}
    rest["key_shape"] = (groups or heads, merged // heads)
    return Host(merged, heads, projection, Query, facts, attention=softmax_of(site, causal=True), **rest)


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
        norms_heads_first: its norms of queries and keys get heads before tokens.
        beside: as of `causal_host`; rotary positions when None.
    """
    layer, config = site.layer, config_of(site)
    heads = int(config.num_attention_heads)
    head_width = int(getattr(layer, "head_dim", config.hidden_size // heads))
    q_norm, k_norm = (first_of(layer, f"{name}_norm", f"{name}_layernorm") for name in "qk")
    chains = ((layer.q_proj, q_norm), (layer.k_proj, k_norm), (layer.v_proj, None))
    # A norm of all heads together (OLMo 2) gets the projection's output as it is.
    together = heads > 1 and getattr(getattr(q_norm, "weight", None), "shape", None) == (heads * head_width,)
    more["groups"] = int(getattr(config, "num_key_value_heads", None) or heads)
    more["between"] = None if together else partial(_with_heads, head_width, norms_heads_first)
    more["beside"] = stored(site) if beside is None else beside
    sources = tuple((projection,) if norm is None else (projection, norm) for projection, norm in chains)
    split = partial(_split, head_width, norms_heads_first, getattr(config, "clip_qkv", None))
    projection = first_of(layer, "o_proj", "out_proj", "dense")
    return causal_host(site, projection, sources, split, head_width=head_width, **more)


@adapts(
    """
    arcee.Arcee cohere.Cohere ernie4_5.Ernie4_5 ernie4_5_moe.Ernie4_5_Moe gemma.Gemma gemma2.Gemma2 glm.Glm
    glm4.Glm4 gpt_oss.GptOss granite.Granite granitemoe.GraniteMoe granitemoeshared.GraniteMoeShared helium.Helium
    jais2.Jais2 llama.Llama ministral.Ministral ministral3.Ministral3 mistral.Mistral mixtral.Mixtral
    nemotron.Nemotron olmo.Olmo olmo2.Olmo2 olmo3.Olmo3 olmoe.Olmoe phimoe.Phimoe qwen2.Qwen2 qwen2_moe.Qwen2Moe
    qwen3.Qwen3 qwen3_moe.Qwen3Moe seed_oss.SeedOss starcoder2.Starcoder2
    """
)
def rotary_attention(site: Site) -> Host:
    """Llama and its like: rotary positions, perhaps fewer heads of keys and values, perhaps norms of queries and keys
    (Qwen3: per head; OLMo 2: of all heads), perhaps a sliding window."""
    return _separate(site)


@adapts("gemma3.Gemma3 phi.Phi stablelm.StableLm")
def heads_first_attention(site: Site) -> Host:
    """`rotary_attention` with norms that get heads before tokens."""
    return _separate(site, norms_heads_first=True)


@adapts("cohere2.Cohere2 smollm3.SmolLM3")
def sometimes_rotary_attention(site: Site) -> Host:
    """Cohere 2 and SmolLM 3: some layers have no positions."""
    layer = site.layer
    turns = layer.use_rope if hasattr(layer, "use_rope") else layer.sliding_window is not None
    return _separate(site, beside=stored(site, None if turns else unturned))


@adapts("exaone4.Exaone4")
def exaone4_attention(site: Site) -> Host:
    """EXAONE 4: beside layers with a sliding window, those without it have no positions."""
    turns = site.layer.sliding_window is None or site.layer.is_sliding
    return _separate(site, norms_heads_first=True, beside=stored(site, None if turns else unturned))


@adapts("hunyuan_v1_dense.HunYuanDenseV1")
def hunyuan_attention(site: Site) -> Host:
    """HunYuan: norms of rotated queries and keys, whose weights see absolute positions."""
    why = "it normalises rotated keys, so that more than their distance counts; take another decoder with rotary "
    return _separate(site, beside=why + "positions (Llama, Mistral, Qwen, ...)")


@adapts("gptj.GPTJ")
def gptj_attention(site: Site) -> Host:
    """GPT-J: rotary positions from a table, which ends."""
    return _separate(site, ends=True, beside=stored(site, turned_in_pairs))


@adapts("opt.OPT gpt_neo.GPTNeoSelf")
def learned_positions_attention(site: Site) -> Host:
    """OPT and GPT-Neo: learned positions, which end. GPT-Neo's local layers mask distant tokens themselves."""
    block = site.parent() if type(site.layer).__name__.startswith("OPT") else site.parent(2)
    host, config = _separate(site, ends=True, beside=TABLE, block=block), config_of(site)
    if getattr(config, "word_embed_proj_dim", config.hidden_size) != config.hidden_size:
        # Tokens of a memory would leave the model through another projection than they entered.
        assert host.stream is not None
        host.stream = replace(host.stream, offers=frozenset())
    return host


@adapts("gpt2.GPT2 gpt_bigcode.GPTBigCode")
def gpt2_attention(site: Site) -> Host | None:
    """GPT-2 and GPT-BigCode (StarCoder), perhaps with one head of keys for all queries: learned positions, which
    end."""
    layer, config = site.layer, site.layer.config
    if layer.is_cross_attention:
        return None
    if config.add_cross_attention:
        site.refuse("add_cross_attention=True: a decoder that attends an encoder takes no memory; one without it does")
    heads, one = int(config.num_attention_heads), getattr(layer, "multi_query", None)
    split = partial(by_groups, heads, heads) if one is False else partial(in_blocks, heads, 1 if one else heads)
    return causal_host(site, layer.c_proj, ((layer.c_attn,),), split, ends=True)


@adapts("phi3.Phi3")
def phi3_attention(site: Site) -> Host:
    """Phi-3: all queries, all keys, all values; perhaps fewer heads of keys."""
    layer, config, beside = site.layer, site.layer.config, stored(site)
    heads, groups = int(config.num_attention_heads), int(config.num_key_value_heads)
    more: dict[str, Any] = {"head_width": int(layer.head_dim), "beside": beside, "groups": groups}
    return causal_host(site, layer.o_proj, ((layer.qkv_proj,),), partial(in_blocks, heads, groups), **more)


@adapts("gpt_neox.GPTNeoX bloom.Bloom falcon.Falcon")
def fused_attention(site: Site) -> Host:
    """GPT-NeoX and Pythia, BLOOM, Falcon: the query, key and value of one head after those of another, or of a group
    of heads (Falcon 40B), or one head of keys for all (7B). Alibi is made of the padding mask, and takes no other."""
    layer, config = site.layer, config_of(site)
    heads = groups = int(config.num_attention_heads)
    split: Callable[..., Any] = by_groups
    slope: Callable[..., Any] | None = None
    if type(layer).__name__.startswith("Bloom"):
        slope = lowered
    elif getattr(config, "alibi", False):
        slope = lowered_by_mask
    if getattr(layer, "new_decoder_architecture", False):
        groups = int(layer.num_kv_heads)
    elif getattr(layer, "multi_query", False):
        groups, split = 1, in_blocks
    more: dict[str, Any] = {"masks": slope is None, "beside": stored(site, slope=slope), "groups": groups}
    if getattr(layer, "slow_but_exact", False) and layer.pretraining_tp > 1:
        site.refuse(
            f"slow_but_exact=True with pretraining_tp={layer.pretraining_tp} multiplies by slices of the output "
            "projection, which leave no place for a memory; set config.slow_but_exact=False"
        )
    return causal_host(site, layer.dense, ((layer.query_key_value,),), partial(split, heads, groups), **more)


SPANS = (
    "its tokens, or a second pass, would enter the states of the host's recurrent layers; take a memory of the "
    "attention layers (grc_stream, memorizing, transformer_xl, ...)"
)
"""Reason why a hybrid model takes no model-level memory."""

GATED = "the layer's projection of queries holds gates, too"
"""Reason why no memory corrects the queries of Qwen3-Next."""

register_recurrent(
    *classes_of(
        """
        bamba.BambaMixer granitemoehybrid.GraniteMoeHybridMambaLayer jamba.JambaMambaMixer lfm2.Lfm2ShortConv
        lfm2_moe.Lfm2MoeShortConv nemotron_h.NemotronHMamba2Mixer olmo_hybrid.OlmoHybridGatedDeltaNet
        qwen3_5.Qwen3_5GatedDeltaNet qwen3_5_moe.Qwen3_5MoeGatedDeltaNet qwen3_next.Qwen3NextGatedDeltaNet
        """
    )
)


@adapts(
    "bamba.Bamba granitemoehybrid.GraniteMoeHybrid jamba.Jamba lfm2.Lfm2 lfm2_moe.Lfm2Moe nemotron_h.NemotronH "
    "olmo_hybrid.OlmoHybrid"
)
def hybrid_attention(site: Site) -> Host:
    """An attention layer beside recurrent layers: rotary positions, or none (Jamba, Nemotron-H)."""
    host = _separate(site)
    assert host.stream is not None
    host.facts = {"relative": False}  # a memory of one layer (memorizing) counts the attention layers
    host.stream.offers, host.lacks = frozenset(), {**host.lacks, "spans": SPANS}
    return host


@adapts("qwen3_next.Qwen3Next qwen3_5.Qwen3_5 qwen3_5_moe.Qwen3_5Moe")
def gated_attention(site: Site) -> Host:
    """Qwen3-Next and Qwen 3.5: each head's query is beside the gate of its output, which a memory adds to."""
    host: Any = hybrid_attention(site)
    head_width = int(site.layer.head_dim)
    host.stream.between = partial(_ungated, 2 * host.heads * head_width, head_width)
    host.offers, host.lacks = host.offers - {"queries"}, {**host.lacks, "queries": GATED}
    return host


def _ungated(gated: int, head_width: int, t_BND: Tensor) -> Tensor:
    """(B, N, H, E) of keys, or of queries, whose projection is as wide as both and their gates."""
    return t_BND.unflatten(-1, (-1, (1 + (t_BND.shape[-1] == gated)) * head_width))[..., :head_width]
