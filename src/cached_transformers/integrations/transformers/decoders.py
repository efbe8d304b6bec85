"""Adapters for transformers' decoders that have a projection each for queries, keys and values. Those with one for all
stand in `fused_decoders.py`. Imports nothing of transformers.

What a memory is given are queries and keys without positions. Where the layer normalises them before it turns them, it
gets them normalised, as the layer compares them; where it normalises what is turned already (HunYuan), as projected.

Legend: B rows, N tokens, H heads, G heads of keys, E head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from cached_transformers.integrations.hosts import Host, Site, Stream, register_adapter
from cached_transformers.seam.memory import Query

from .described import config_of, first_of, in_transformers, softmax_of
from .streams import TAKE_MASKS, add_stream_memory

BY_TOKEN = frozenset({"state", "head"})
"""What a causal layer offers a memory of its own: it gives queries, keys and values of the segment."""


def causal_host(
    site: Site,
    projection: nn.Module,
    sources: tuple[nn.Module, ...],
    split: Callable[..., tuple[Tensor, Tensor, Tensor]],
    *,
    head_width: int | None = None,
    ends: bool = False,
    masks: bool = True,
) -> Host:
    """What decoders have in common.

    Args:
        projection: of the merged heads. sources, split: see `Stream`.
        head_width: E, where it is not the model's width by the number of heads.
        ends: whether positions are a table, which ends.
        masks: whether the model can be told who sees whom.
    """
    layer: Any = site.layer
    config = config_of(site)
    width, heads = int(config.hidden_size), int(config.num_attention_heads)
    merged = heads * (head_width or width // heads)
    index = getattr(layer, "layer_idx", getattr(layer, "layer_id", None))
    takes = masks and config._attn_implementation in TAKE_MASKS
    return Host(
        merged,
        heads,
        projection,
        Query,
        {"index": index, "depth": config.num_hidden_layers},
        attention=softmax_of(site, causal=True),
        offers=BY_TOKEN,
        channels=width,
        stream=Stream(
            add_stream_memory,
            sources,
            split,
            longest=int(config.max_position_embeddings) if ends else None,
            offers=frozenset({"state", "tokens_round", *({"bias"} if takes else ())}),
            window=_window(layer, config),
        ),
    )


def _window(layer: Any, config: Any) -> int | None:
    """Tokens that a token of this layer sees, itself included; None where it sees all before it."""
    window = getattr(layer, "sliding_window", getattr(config, "sliding_window", None))
    return None if window is None else int(window)


def by_head(t: Tensor, head_width: int, heads_first: bool) -> Tensor:
    """(B, H, N, E) of (B, N, H * E), of (B, N, H, E), or of what is so already."""
    if t.dim() == 3:
        t = t.unflatten(-1, (-1, head_width))
    elif heads_first:
        return t
    return t.transpose(1, 2)


def for_every_head(heads: int, q_BHNE: Tensor, k_BGNE: Tensor, v_BGNE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values that several heads of queries share, for each of them."""
    k_BHNE, v_BHNE = (
        t if t.shape[1] == heads else t.repeat_interleave(heads // t.shape[1], 1) for t in (k_BGNE, v_BGNE)
    )
    return q_BHNE, k_BHNE, v_BHNE


def _split(heads: int, head_width: int, heads_first: bool, *qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return for_every_head(heads, *(by_head(t, head_width, heads_first) for t in qkv))


def _separate(site: Site, *, norms_heads_first: bool = False, **more: Any) -> Host:
    """A layer with a projection each.

    Args:
        norms_heads_first: whether its norms of queries and keys are given heads before tokens.
    """
    layer, config = site.layer, config_of(site)
    heads = int(config.num_attention_heads)
    head_width = int(getattr(layer, "head_dim", config.hidden_size // heads))
    sources = (
        first_of(layer, "q_norm", "q_layernorm", "q_proj"),
        first_of(layer, "k_norm", "k_layernorm", "k_proj"),
        layer.v_proj,
    )
    split = partial(_split, heads, head_width, norms_heads_first)
    return causal_host(
        site, first_of(layer, "o_proj", "out_proj", "dense"), sources, split, head_width=head_width, **more
    )


@register_adapter(
    *in_transformers(
        "arcee.ArceeAttention",
        "cohere.CohereAttention",
        "cohere2.Cohere2Attention",
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
        "hunyuan_v1_dense.HunYuanDenseV1Attention",
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
        "smollm3.SmolLM3Attention",
        "starcoder2.Starcoder2Attention",
    )
)
def rotary_attention(site: Site) -> Host:
    """Llama and its like: rotary positions, perhaps fewer heads of keys and values, perhaps norms of queries and keys
    (Qwen3: of each head; OLMo 2: of all together), perhaps a sliding window."""
    return _separate(site)


@register_adapter(
    *in_transformers(
        "exaone4.Exaone4Attention",
        "gemma3.Gemma3Attention",
        "phi.PhiAttention",
        "stablelm.StableLmAttention",
    )
)
def heads_first_attention(site: Site) -> Host:
    """As `rotary_attention`, with norms that come after the heads were put before the tokens."""
    return _separate(site, norms_heads_first=True)


@register_adapter(*in_transformers("gptj.GPTJAttention"))
def gptj_attention(site: Site) -> Host:
    """GPT-J: rotary positions out of a table, which ends."""
    return _separate(site, ends=True)


@register_adapter(*in_transformers("opt.OPTAttention", "gpt_neo.GPTNeoSelfAttention"))
def learned_positions_attention(site: Site) -> Host:
    """OPT and GPT-Neo: learned positions, which end. GPT-Neo's local layers mask what is far in themselves."""
    host, config = _separate(site, ends=True), config_of(site)
    if getattr(config, "word_embed_proj_dim", config.hidden_size) != config.hidden_size:
        # Tokens of a memory would leave the model by another projection than they came in.
        assert host.stream is not None
        host.stream = replace(host.stream, offers=frozenset())
    return host
