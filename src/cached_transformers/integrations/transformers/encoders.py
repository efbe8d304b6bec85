"""Adapters for transformers' encoders of texts, sounds and images. Imports nothing of transformers.

An encoder-decoder gets its memory only in the encoder, as in the paper (arXiv:2312.12742, section 4.3); its causal
layers and its cross-attention remain as they are. Each row's valid tokens are spread over the slots.

Legend: B rows, N tokens, H heads, E head width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers.checks import insist
from cached_transformers.integrations.hosts import WHOLE, Host, Site, Stream
from cached_transformers.integrations.masks import MASKED, map_size, no_mask, padding_behind_window, padding_of
from cached_transformers.interfaces.memory import Query

from .adapter_utils import adapts, by_groups, config_of, first_of, in_blocks, softmax_of
from .add_stateful_memory import add_stream_memory

Split = Callable[..., Any]
BERTS = """
    bert.Bert bert_generation.BertGeneration camembert.Camembert electra.Electra ernie.Ernie roberta.Roberta
    roberta_prelayernorm.RobertaPreLayerNorm xlm_roberta.XLMRoberta xlm_roberta_xl.XLMRobertaXL xmod.Xmod
"""


def text_stream(site: Site, sources: tuple[nn.Module, ...] = (), split: Split | None = None) -> Stream:
    """The `Stream` of an encoder of texts; `sources` and `split` as there, or None for separate projections."""
    body: Any = site.holder("embeddings")
    embeddings = getattr(body, "embeddings", None)
    if split is None:
        sources, split = _separate(site)
    entrance: tuple[nn.Module, ...] = ()
    if embeddings is not None:  # some are narrower than the layers
        mapped = getattr(getattr(body, "encoder", None), "embedding_hidden_mapping_in", None)
        widened = (getattr(body, "embeddings_project", None), mapped)
        entrance = (embeddings, *(module for module in widened if module is not None))
    return _stream(site, entrance, sources, split, longest=_positions(embeddings))


def _stream(
    site: Site, entrance: tuple[nn.Module, ...], sources: tuple[nn.Module, ...], split: Split, **more: Any
) -> Stream:
    offers: frozenset[str] = frozenset({"state", "tokens_round"} if entrance else ())
    more |= {"offers": offers, "causal": False, "entrance": entrance}
    return Stream(add_stream_memory, site.block(), tuple((module,) for module in sources), split, **more)


def _separate(site: Site) -> tuple[tuple[nn.Module, ...], Split]:
    """Separate projections for queries, keys and values, and how their outputs are split."""

    def found(layer: Any) -> tuple[Any, ...]:
        return tuple(
            first_of(layer, part, f"{part[0]}_proj", f"{part[0]}_lin", f"{part}_proj", part[0])
            for part in ("query", "key", "value")
        )

    sources = found(site.layer)
    if None in sources:  # DINOv2 before transformers 5.18 has them in a module of its own
        sources = found(site.layer.attention)
    return sources, partial(_split, int(config_of(site).num_attention_heads))


def _split(heads: int, q_BND: Tensor, k_BND: Tensor, v_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q_BND, k_BND, v_BND))
    return q, k, v


def _positions(embeddings: Any) -> int | None:
    """Number of tokens that have positions; None where there is no table of positions."""
    table = getattr(embeddings, "position_embeddings", None)
    if not isinstance(table, nn.Embedding) or not getattr(embeddings, "position_biased_input", True):
        return None
    padding: int | None = getattr(embeddings, "padding_idx", None)  # some count from the entry after it
    return table.num_embeddings - (0 if padding is None else padding + 1)


def padded_query(
    hidden_states: Tensor, attention_mask: Tensor | None = None, *_: Any, is_causal: bool = False, **__: Any
) -> Query:
    """Query of the layer's input, with its padding from a mask that is the same for all queries."""
    no_mask(None, is_causal)
    return Query(hidden_states, padding_BN=padding_of(attention_mask, hidden_states.shape[1]))


def _windowed_query(hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Query:
    """`padded_query` for a mask with a window."""
    return Query(hidden_states, padding_BN=padding_behind_window(attention_mask, hidden_states.shape[1]))


def _multiplied_query(hidden_states: Tensor, attention_mask: Tensor, *_: Any, **__: Any) -> Query:
    """`padded_query` for a mask of ones and zeros that hides every key from padding."""
    return _windowed_query(hidden_states, attention_mask != 0)


def encoder_host(
    site: Site,
    projection: nn.Module,
    *,
    query: Callable[..., Query] = padded_query,
    bias: bool = False,
    stream: Stream | None = None,
) -> Host:
    """The description of an encoder of tokens; not all have a table of positions.

    Args:
        projection: of the merged heads. query: reads the layer's arguments. bias: the layer's mask holds a bias.
    """
    config = config_of(site)
    width, heads = int(config.hidden_size), int(config.num_attention_heads)
    longest = int(first_of(config, "max_source_positions", "max_position_embeddings") or 0)
    facts, attention = {"length": site.length(longest)}, softmax_of(site, bias=bias)
    offers = WHOLE if stream is None else WHOLE | {"state"}
    return Host(width, heads, projection, query, facts, attention=attention, offers=offers, stream=stream)


@adapts(f"{BERTS} megatron_bert.MegatronBert rembert.RemBert", "SelfAttention")
def bert_attention(site: Site) -> Host:
    """BERT and its like as encoders; a module beside the attention projects the heads."""
    family, above = type(site.layer).__name__.removesuffix("SelfAttention"), site.parent()
    projection: Any = above.output.dense  # type: ignore[union-attr]
    if not site.layer.is_decoder:
        return encoder_host(site, projection, stream=text_stream(site))
    site.refuse(f"{family} with is_decoder=True is causal, and has no place for a state")
    host = encoder_host(site, projection)
    host.attention = softmax_of(site, causal=True)
    return host


@adapts("albert.Albert distilbert.DistilBertSelf mpnet.MPNetSelf")
def projecting_attention(site: Site) -> Host:
    """DistilBERT, MPNet, ALBERT, whose attention projects its heads itself. ALBERT calls one layer repeatedly: so it
    does the memory, whose cache is updated by each call."""
    return encoder_host(site, first_of(site.layer, "out_lin", "dense", "o"), stream=text_stream(site))


@adapts("deberta. deberta_v2.", "DisentangledSelfAttention")
def deberta_attention(site: Site) -> Host:
    """DeBERTa: relative positions act on the logits, content with position and position with content."""
    layer: Any = site.layer
    above: Any = site.parent()
    if hasattr(layer, "in_proj"):  # the first version, which adds its biases afterwards
        stream = text_stream(site, (layer.in_proj,), partial(_biased, layer))
    else:
        stream = text_stream(site)
    host = encoder_host(site, above.output.dense, query=_multiplied_query, bias=True, stream=stream)
    host.attention.refusal = f"{type(layer).__name__} computes its logits and their softmax itself"
    return host


def _biased(layer: Any, qkv_BNL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    heads = int(layer.num_attention_heads)
    q, k, v = by_groups(heads, heads, qkv_BNL)
    q_bias_HE, v_bias_HE = (bias.unflatten(0, (heads, -1)) for bias in (layer.q_bias, layer.v_bias))
    return q + q_bias_HE[:, None], k, v + v_bias_HE[:, None]


@adapts("modernbert.ModernBert")
def modernbert_attention(site: Site) -> Host:
    """ModernBERT: two layers of three see a window of their neighbours. The memory shows them everything that was
    read."""
    layer, config = site.layer, config_of(site)
    if "flash" in config._attn_implementation:
        site.refuse(
            f"attn_implementation={config._attn_implementation!r} may pack ModernBERT's rows into one, in which a "
            "memory cannot tell them apart; call model.set_attn_implementation('sdpa')"
        )
    heads = int(config.num_attention_heads)
    stream = text_stream(site, (layer.Wqkv,), partial(in_blocks, heads, heads))
    return encoder_host(site, layer.Wo, query=_windowed_query, stream=stream)


@adapts(
    """
    bart.Bart blenderbot.Blenderbot blenderbot_small.BlenderbotSmall hubert.Hubert m2m_100.M2M100 marian.Marian
    mbart.MBart pegasus.Pegasus plbart.PLBart wav2vec2.Wav2Vec2 whisper.Whisper
    """
)
def bart_attention(site: Site) -> Host | None:
    """BART and its like, and the encoders of sounds. HuBERT and Wav2Vec2 have no table of positions."""
    layer = site.layer
    if layer.is_decoder:
        return None
    host = encoder_host(site, layer.out_proj)
    host.width, host.heads = int(layer.embed_dim), int(layer.num_heads)
    return host


@adapts("mt5.MT5 switch_transformers.SwitchTransformers t5.T5 umt5.UMT5")
def t5_attention(site: Site) -> Host | None:
    """T5's encoder and its like. The merged heads may be wider or narrower than the model."""
    layer = site.layer
    if layer.is_decoder:
        return None
    host = encoder_host(site, layer.o, query=_t5_query, bias=True)
    host.width, host.heads, host.channels = layer.inner_dim, layer.n_heads, layer.d_model
    return host


def _t5_query(
    hidden_states: Tensor, mask: Tensor | None = None, attention_mask: Tensor | None = None, **_: Any
) -> Query:
    return padded_query(hidden_states, attention_mask if mask is None else mask)


PREFIX = {"deit": 2, "ijepa": 0, "siglip_vision_model": 0}
"""Tokens before the patches, registers not counted, of the model types that have another number than one."""


@adapts(
    """
    beit.Beit deit.DeiT dinov2.Dinov2 dinov2_with_registers.Dinov2WithRegisters dinov3_vit.DINOv3ViT ijepa.IJepa
    vit.ViT vit_msn.ViTMSN
    """
)
def patch_attention(site: Site) -> Host:
    """ViT and its like: class tokens and registers before the patches, a slot for every token. The mask of BEiT's
    layers is a bias, which stays with their own attention."""
    config, bias = config_of(site), type(site.layer).__name__.startswith("Beit")
    prefix = PREFIX.get(config.model_type, 1) + int(getattr(config, "num_register_tokens", 0))
    image, patch = _pair(config.image_size), _pair(config.patch_size)
    grid = (image[0] // patch[0], image[1] // patch[1])
    projection: Any = first_of(site.layer, "o_proj", "out_proj")
    if projection is None:  # DINOv2 before transformers 5.18
        projection = site.layer.output.dense
    # Tokens of a memory may surround the patches where a layer sees neither biases nor a pooling of all tokens.
    surrounded = not bias and config.model_type not in ("clip_vision_model", "siglip_vision_model")
    embeddings: Any = getattr(site.holder("embeddings"), "embeddings", None) if surrounded else None
    return Host(
        *(config.hidden_size, config.num_attention_heads, projection, partial(_patch_query, grid, prefix, bias)),
        facts={"length": grid[0] * grid[1] + prefix, "size": grid, "prefix": prefix},
        attention=softmax_of(site, bias=bias),
        offers=WHOLE | {"token_map", "state"},
        stream=_stream(site, () if embeddings is None else (embeddings,), *_separate(site), cuts=False),
    )


def _patch_query(
    grid: tuple[int, int],
    prefix: int,
    bias: bool,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> Query:
    if not bias and attention_mask is not None and torch.compiler.is_compiling():
        # Traced code gets a mask even if nothing is hidden, which only a run can tell.
        visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask >= 0
        insist(visible.all(), MASKED)
    elif not bias:
        no_mask(attention_mask)
    return Query(hidden_states, size=map_size(hidden_states.shape[1], prefix, grid))


@adapts("clip.CLIP siglip.Siglip")
def pair_attention(site: Site) -> Host | None:
    """CLIP and SigLIP: images, and texts, which CLIP reads causally and which then remain as they are."""
    if hasattr(config_of(site), "image_size"):
        return patch_attention(site)
    if type(site.layer).__name__.startswith("Siglip"):
        return encoder_host(site, site.layer.out_proj)
    if not hasattr(site.model, "vision_model") and not hasattr(getattr(site.model, "config", None), "vision_config"):
        raise ValueError(
            f"{type(site.model).__name__} reads causally, and has no place for a state: a shared memory would show a "
            "token later ones; CLIP's encoder of images takes one"
        )
    return None


@adapts("swin.Swin")
def swin_attention(site: Site) -> Host:
    """Swin: rows are windows of all images, and the cache is one window; only the self branch sees the shift mask."""
    layer, config = site.layer, config_of(site)
    side, heads = int(config.window_size), int(layer.num_attention_heads)
    facts: dict[str, Any] = {"length": side * side, "size": (side, side), "bias": bool(config.qkv_bias)}
    if site.settings.get("variant") == "released":  # there the memory branch has a table of relative positions, too
        facts["window"] = (side, side)
    attention, width = softmax_of(site, bias=True), heads * int(layer.head_dim)
    return Host(width, heads, layer.o_proj, _window_query, facts, attention=attention)


def _window_query(hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Query:
    side = round(hidden_states.shape[1] ** 0.5)
    return Query(hidden_states, size=(side, side))


def _pair(value: Any) -> tuple[int, int]:
    return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[1]))


@adapts(BERTS, "CrossAttention")
@adapts("siglip.SiglipMultihead", "AttentionPoolingHead")
def left_attention(site: Site) -> None:
    """Attention to another model's output, and one query that pools all tokens: they remain as they are."""
