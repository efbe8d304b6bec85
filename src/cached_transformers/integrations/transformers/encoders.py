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
from cached_transformers.integrations.hosts import WHOLE, Host, Site, Stream, register_adapter
from cached_transformers.integrations.masks import MASKED, map_size, no_mask, padding_behind_window, padding_of
from cached_transformers.interfaces.memory import Query

from .adapter_utils import config_of, first_of, in_transformers, softmax_of
from .add_stateful_memory import add_stream_memory

Split = Callable[..., Any]


def text_stream(site: Site, sources: tuple[nn.Module, ...] = (), split: Split | None = None) -> Stream:
    """The `Stream` of an encoder of texts.

    Args:
        sources, split: see `Stream`; None for a layer with separate projections.
    """
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


def image_stream(site: Site, surrounds: bool) -> Stream:
    """The `Stream` of an encoder of images.

    Args:
        surrounds: whether tokens of a memory may surround those of an image.
    """
    embeddings: Any = getattr(site.holder("embeddings"), "embeddings", None)
    entrance = (embeddings,) if surrounds and embeddings is not None else ()
    return _stream(site, entrance, *_separate(site), cuts=False)


def _stream(
    site: Site, entrance: tuple[nn.Module, ...], sources: tuple[nn.Module, ...], split: Split, **more: Any
) -> Stream:
    return Stream(
        add=add_stream_memory,
        block=site.block(),
        sources=tuple((module,) for module in sources),
        split=split,
        offers=frozenset({"state", "tokens_round"} if entrance else ()),
        causal=False,
        entrance=entrance,
        **more,
    )


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


def in_blocks(heads: int, qkv_BNL: Tensor) -> tuple[Tensor, ...]:
    """Queries, keys and values (B, H, N, E) of one projection that gives all queries, all keys, all values."""
    return qkv_BNL.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def by_heads(heads: int, qkv_BNL: Tensor) -> tuple[Tensor, ...]:
    """The same of one projection that gives the query, key and value of one head after those of another."""
    return qkv_BNL.unflatten(-1, (heads, 3, -1)).permute(3, 0, 2, 1, 4).unbind(0)


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
    longest: int = 0,
    *,
    query: Callable[..., Query] = padded_query,
    bias: bool = False,
    stream: Stream | None = None,
) -> Host:
    """The description of an encoder of tokens.

    Args:
        projection: of the merged heads. longest: number of tokens that have positions, 0 where it is not known.
        query: reads the layer's arguments. bias: whether the layer's mask holds a bias. stream: see `Host`.
    """
    config = config_of(site)
    width, heads = int(config.hidden_size), int(config.num_attention_heads)
    facts, attention = {"length": site.length(longest)}, softmax_of(site, bias=bias)
    offers = WHOLE if stream is None else WHOLE | {"state"}
    return Host(width, heads, projection, query, facts, attention=attention, offers=offers, stream=stream)


@register_adapter(
    *in_transformers(
        "bert.BertSelfAttention",
        "bert_generation.BertGenerationSelfAttention",
        "camembert.CamembertSelfAttention",
        "electra.ElectraSelfAttention",
        "ernie.ErnieSelfAttention",
        "megatron_bert.MegatronBertSelfAttention",
        "rembert.RemBertSelfAttention",
        "roberta.RobertaSelfAttention",
        "roberta_prelayernorm.RobertaPreLayerNormSelfAttention",
        "xlm_roberta.XLMRobertaSelfAttention",
        "xlm_roberta_xl.XLMRobertaXLSelfAttention",
        "xmod.XmodSelfAttention",
    )
)
def bert_attention(site: Site) -> Host:
    """BERT and its like as encoders; a module beside the attention projects the heads."""
    longest = int(config_of(site).max_position_embeddings)
    projection: Any = site.parent()
    if not site.layer.is_decoder:
        return encoder_host(site, projection.output.dense, longest, stream=text_stream(site))
    # A decoder takes no memory, at any length.
    site = Site(site.model, site.name, site.layer, {**site.settings, "length": 0}, site.memory, site.slots)
    host = encoder_host(site, projection.output.dense)
    host.attention = softmax_of(site, causal=True)
    family = type(site.layer).__name__.removesuffix("SelfAttention")
    host.refusal = f"{family} with is_decoder=True is causal, and has no place for a state"
    return host


@register_adapter(
    *in_transformers(
        "albert.AlbertAttention",
        "distilbert.DistilBertSelfAttention",
        "mpnet.MPNetSelfAttention",
    )
)
def projecting_attention(site: Site) -> Host:
    """DistilBERT, MPNet, ALBERT, whose attention projects its heads itself. ALBERT calls one layer repeatedly: so it
    does the memory, whose cache is updated by each call."""
    layer: Any = site.layer
    projection = first_of(layer, "out_lin", "dense", "o")
    return encoder_host(site, projection, int(config_of(site).max_position_embeddings), stream=text_stream(site))


@register_adapter(*in_transformers("deberta.DisentangledSelfAttention", "deberta_v2.DisentangledSelfAttention"))
def deberta_attention(site: Site) -> Host:
    """DeBERTa: relative positions act on the logits, content with position and position with content."""
    above: Any = site.parent()
    longest = int(config_of(site).max_position_embeddings)
    layer: Any = site.layer
    if hasattr(layer, "in_proj"):  # the first version, which adds its biases afterwards
        stream = text_stream(site, (layer.in_proj,), partial(_biased, layer))
    else:
        stream = text_stream(site)
    host = encoder_host(site, above.output.dense, longest, query=_multiplied_query, bias=True, stream=stream)
    host.attention.refusal = f"{type(site.layer).__name__} computes its logits and their softmax itself"
    return host


def _biased(layer: Any, qkv_BNL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = by_heads(int(layer.num_attention_heads), qkv_BNL)
    q_bias_HE, v_bias_HE = (bias.unflatten(0, (q.shape[1], -1)) for bias in (layer.q_bias, layer.v_bias))
    return q + q_bias_HE[:, None], k, v + v_bias_HE[:, None]


@register_adapter(*in_transformers("modernbert.ModernBertAttention"))
def modernbert_attention(site: Site) -> Host:
    """ModernBERT: two layers of three see a window of their neighbours. The memory shows them everything that was
    read."""
    layer: Any = site.layer
    config = config_of(site)
    stream = text_stream(site, (layer.Wqkv,), partial(in_blocks, int(config.num_attention_heads)))
    host = encoder_host(site, layer.Wo, int(config.max_position_embeddings), query=_windowed_query, stream=stream)
    if "flash" in config_of(site)._attn_implementation:
        host.refusal = (
            f"attn_implementation={config_of(site)._attn_implementation!r} may pack ModernBERT's rows into one, in "
            "which a memory cannot tell them apart; call model.set_attn_implementation('sdpa')"
        )
    return host


@register_adapter(
    *in_transformers(
        "bart.BartAttention",
        "blenderbot.BlenderbotAttention",
        "blenderbot_small.BlenderbotSmallAttention",
        "hubert.HubertAttention",
        "m2m_100.M2M100Attention",
        "marian.MarianAttention",
        "mbart.MBartAttention",
        "pegasus.PegasusAttention",
        "plbart.PLBartAttention",
        "wav2vec2.Wav2Vec2Attention",
        "whisper.WhisperAttention",
    )
)
def bart_attention(site: Site) -> Host | None:
    """BART and its like, and the encoders of sounds. HuBERT and Wav2Vec2 have no table of positions."""
    layer: Any = site.layer
    if layer.is_decoder:
        return None
    longest = first_of(config_of(site), "max_source_positions", "max_position_embeddings")
    host = encoder_host(site, layer.out_proj, int(longest or 0))
    host.width, host.heads = int(layer.embed_dim), int(layer.num_heads)
    return host


@register_adapter(
    *in_transformers(
        "mt5.MT5Attention",
        "switch_transformers.SwitchTransformersAttention",
        "t5.T5Attention",
        "umt5.UMT5Attention",
    )
)
def t5_attention(site: Site) -> Host | None:
    """T5's encoder and its like. The merged heads may be wider or narrower than the model."""
    layer: Any = site.layer
    if layer.is_decoder:
        return None
    facts = {"length": site.length()}
    attention = softmax_of(site, bias=True)
    return Host(
        *(layer.inner_dim, layer.n_heads, layer.o, _t5_query, facts),
        attention=attention,
        offers=WHOLE,
        channels=layer.d_model,
    )


def _t5_query(
    hidden_states: Tensor, mask: Tensor | None = None, attention_mask: Tensor | None = None, **_: Any
) -> Query:
    return padded_query(hidden_states, attention_mask if mask is None else mask)


def patch_host(site: Site, prefix: int, *, bias: bool = False, surrounds: bool = False) -> Host:
    """The description of an encoder of patches: a slot for every token.

    Args:
        prefix: tokens before the map. bias: whether the layer's mask is a bias, which hides nothing.
        surrounds: whether tokens of a memory may surround those of an image.
    """
    config = config_of(site)
    image, patch = _pair(config.image_size), _pair(config.patch_size)
    grid = (image[0] // patch[0], image[1] // patch[1])
    facts = {"length": grid[0] * grid[1] + prefix, "size": grid, "prefix": prefix}
    query = partial(_biased_query if bias else _patch_query, grid, prefix)
    projection: Any = first_of(site.layer, "o_proj", "out_proj")
    if projection is None:  # DINOv2 before transformers 5.18
        projection = site.layer.output.dense  # type: ignore[union-attr]
    attention = softmax_of(site, bias=bias)
    return Host(
        *(config.hidden_size, config.num_attention_heads, projection, query, facts),
        attention=attention,
        offers=WHOLE | {"token_map", "state"},
        stream=image_stream(site, surrounds),
    )


def _patch_query(
    grid: tuple[int, int], prefix: int, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any
) -> Query:
    if attention_mask is not None and torch.compiler.is_compiling():
        # Traced code gets a mask even if nothing is hidden, which only a run can tell.
        visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask >= 0
        insist(visible.all(), MASKED)
    else:
        no_mask(attention_mask)
    return Query(hidden_states, size=map_size(hidden_states.shape[1], prefix, grid))


def _biased_query(grid: tuple[int, int], prefix: int, hidden_states: Tensor, *_: Any, **__: Any) -> Query:
    return Query(hidden_states, size=map_size(hidden_states.shape[1], prefix, grid))


@register_adapter(*in_transformers("vit.ViTAttention", "vit_msn.ViTMSNAttention", "dinov2.Dinov2Attention"))
def vit_attention(site: Site) -> Host:
    """ViT, MSN and DINOv2: one class token before the patches."""
    return patch_host(site, 1, surrounds=True)


@register_adapter(*in_transformers("deit.DeiTAttention"))
def deit_attention(site: Site) -> Host:
    """DeiT: a class token and one for distillation."""
    return patch_host(site, 2, surrounds=True)


@register_adapter(*in_transformers("ijepa.IJepaAttention"))
def ijepa_attention(site: Site) -> Host:
    """I-JEPA: only patches."""
    return patch_host(site, 0, surrounds=True)


@register_adapter(
    *in_transformers(
        "dinov2_with_registers.Dinov2WithRegistersAttention",
        "dinov3_vit.DINOv3ViTAttention",
    )
)
def registers_attention(site: Site) -> Host:
    """DINOv2 with registers and DINOv3: a class token and registers."""
    return patch_host(site, 1 + int(config_of(site).num_register_tokens), surrounds=True)


@register_adapter(*in_transformers("beit.BeitAttention"))
def beit_attention(site: Site) -> Host:
    """BEiT: relative positions as a bias, which stays with the layer's own attention."""
    return patch_host(site, 1, bias=True)


@register_adapter(*in_transformers("clip.CLIPAttention"))
def clip_attention(site: Site) -> Host | None:
    """CLIP's images. Its texts are causal, and remain as they are."""
    if hasattr(config_of(site), "image_size"):
        return patch_host(site, 1)
    if not hasattr(site.model, "vision_model") and not hasattr(getattr(site.model, "config", None), "vision_config"):
        raise ValueError(
            f"{type(site.model).__name__} reads causally, and has no place for a state: a shared memory would show a "
            "token later ones; CLIP's encoder of images takes one"
        )
    return None


@register_adapter(*in_transformers("siglip.SiglipAttention"))
def siglip_attention(site: Site) -> Host:
    """SigLIP: images of patches without other tokens; texts that are not causal."""
    config = config_of(site)
    if hasattr(config, "image_size"):
        return patch_host(site, 0)
    projection: Any = site.layer.out_proj
    return encoder_host(site, projection, int(config.max_position_embeddings))


@register_adapter(*in_transformers("swin.SwinAttention"))
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
