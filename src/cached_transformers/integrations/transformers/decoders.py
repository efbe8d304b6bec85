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

from cached_transformers.integrations.hosts import Host, Site, Stored, Stream, register_adapter
from cached_transformers.interfaces.memory import Query

from .add_stateful_memory import add_stream_memory
from .config_utils import TAKE_MASKS, config_of, first_of, in_transformers, no_masks, softmax_of
from .rotary import stored, turned_in_pairs, unturned

BY_TOKEN = frozenset({"state", "head"})
"""What a causal layer offers a memory of its own: it gives queries, keys and values of the segment."""
SPANNING = frozenset({"state", "tokens_round", "slots_in_front", "layer_traces"})
"""What a causal model offers a memory that spans its layers."""
BESIDE = frozenset({"context"})
"""What it offers where it can attend more than its segment."""
TABLE = (
    "its positions are a table added to the tokens, so that stored states would claim to stand in the segment that "
    "reads them; take a decoder with rotary positions (Llama, Mistral, Qwen, Gemma, Phi, ...) or alibi (BLOOM)"
)
"""Why a layer cannot attend hidden states of earlier segments."""


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
    beside: Stored | str = TABLE,
    block: nn.Module | None = None,
    groups: int | None = None,
) -> Host:
    """What decoders have in common.

    Args:
        projection: of the merged heads. sources, split, between: see `Stream`.
        head_width: E, where it is not the model's width by the number of heads.
        ends: whether positions are a table, which ends.
        masks: whether the model can be told who sees whom.
        beside: how the layer attends hidden states of earlier segments, or why it does not.
        block: the module round the layer; the one that holds it when None.
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
    """Tokens that a token of this layer sees, itself included; None where it sees all before it."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[layer.layer_idx] != "sliding_attention":
        return None
    window = getattr(layer, "sliding_window", getattr(config, "sliding_window", None))
    return None if window is None else int(window)


def by_head(t: Tensor, head_width: int, heads_first: bool) -> Tensor:
    """(B, H, N, E) of (B, N, H * E), of (B, N, H, E), or of what is so already."""
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
    """Of outputs in whatever layout; OLMo limits them."""
    if limit is not None:
        q, k, v = (None if t is None else t.clamp(-limit, limit) for t in (q, k, v))  # type: ignore[assignment]
    k, v = (by_head(t, head_width, heads_first) for t in (k, v))
    return None if q is None else by_head(q, head_width, heads_first), k, v


def _separate(site: Site, *, norms_heads_first: bool = False, beside: Stored | str | None = None, **more: Any) -> Host:
    """A layer with a projection each.

    Args:
        norms_heads_first: whether its norms of queries and keys are given heads before tokens.
        beside: as of `causal_host`; rotary positions when None.
    """
    layer, config = site.layer, config_of(site)
    heads = int(config.num_attention_heads)
    head_width = int(getattr(layer, "head_dim", config.hidden_size // heads))
    q_norm, k_norm = (first_of(layer, f"{name}_norm", f"{name}_layernorm") for name in "qk")
    chains = ((layer.q_proj, q_norm), (layer.k_proj, k_norm), (layer.v_proj, None))
    # A norm of all heads together (OLMo 2) gets what is projected as it is.
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
    (Qwen3: of each head; OLMo 2: of all together), perhaps a sliding window."""
    return _separate(site)


@register_adapter(
    *in_transformers(
        "gemma3.Gemma3Attention",
        "phi.PhiAttention",
        "stablelm.StableLmAttention",
    )
)
def heads_first_attention(site: Site) -> Host:
    """As `rotary_attention`, with norms that come after the heads were put before the tokens."""
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
    """HunYuan: norms of queries and keys that are turned already, whose weights see where each stands."""
    why = (
        "it normalises keys that are turned already, so that more than their distance counts; take another decoder "
        "with rotary positions (Llama, Mistral, Qwen, ...)"
    )
    return _separate(site, beside=why)


@register_adapter(*in_transformers("gptj.GPTJAttention"))
def gptj_attention(site: Site) -> Host:
    """GPT-J: rotary positions out of a table, which ends."""
    return _separate(site, ends=True, beside=stored(site, turned_in_pairs))


@register_adapter(*in_transformers("opt.OPTAttention", "gpt_neo.GPTNeoSelfAttention"))
def learned_positions_attention(site: Site) -> Host:
    """OPT and GPT-Neo: learned positions, which end. GPT-Neo's local layers mask what is far in themselves."""
    block = site.parent() if type(site.layer).__name__.startswith("OPT") else site.parent(2)
    host, config = _separate(site, ends=True, beside=TABLE, block=block), config_of(site)
    if getattr(config, "word_embed_proj_dim", config.hidden_size) != config.hidden_size:
        # Tokens of a memory would leave the model by another projection than they came in.
        assert host.stream is not None
        host.stream = replace(host.stream, offers=frozenset())
    return host
