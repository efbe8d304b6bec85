"""Adapters for transformers' encoders of texts and sounds. Imports nothing of transformers.

An encoder-decoder gets its memory in the encoder alone, as in the paper (arXiv:2312.12742, section 4.3); what is causal
and what attends the encoder's output is left as it is. Each row's valid tokens are spread over the slots.

Legend: B rows, N tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from cached_transformers.integrations.hosts import WHOLE, Host, Site, Stream, register_adapter
from cached_transformers.integrations.masks import no_mask, padding_behind_window, padding_of
from cached_transformers.interfaces.memory import Query

from .config_utils import config_of, first_of, in_transformers, softmax_of
from .encoder_streams import by_heads, in_blocks, text_stream


def padded_query(
    hidden_states: Tensor, attention_mask: Tensor | None = None, *_: Any, is_causal: bool = False, **__: Any
) -> Query:
    """The layer's input, and its padding from a mask that is the same for all queries."""
    no_mask(None, is_causal)
    return Query(hidden_states, padding_BN=padding_of(attention_mask, hidden_states.shape[1]))


def _windowed_query(hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Query:
    """As `padded_query`, of a mask that shows a query some keys alone."""
    return Query(hidden_states, padding_BN=padding_behind_window(attention_mask, hidden_states.shape[1]))


def _multiplied_query(hidden_states: Tensor, attention_mask: Tensor, *_: Any, **__: Any) -> Query:
    """As `padded_query`, of a mask of ones and zeros that hides from padding all there is."""
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
    """What encoders of tokens have in common.

    Args:
        projection: of the merged heads. longest: tokens that the host has positions for, 0 where that is not known.
        query: reads the layer's arguments. bias: whether the layer's mask holds one. stream: see `Host`.
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
    """BERT and its like as encoders; a module beside the attention projects its heads."""
    longest = int(config_of(site).max_position_embeddings)
    projection: Any = site.parent()
    if not site.layer.is_decoder:
        return encoder_host(site, projection.output.dense, longest, stream=text_stream(site))
    # A decoder takes no memory, whatever its length.
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
    """DistilBERT, MPNet, ALBERT, whose attention projects its heads itself. ALBERT's layers are one, which is called
    again and again: so is their memory, and its cache moves on with each call."""
    layer: Any = site.layer
    projection = first_of(layer, "out_lin", "dense", "o")
    return encoder_host(site, projection, int(config_of(site).max_position_embeddings), stream=text_stream(site))


@register_adapter(*in_transformers("deberta.DisentangledSelfAttention", "deberta_v2.DisentangledSelfAttention"))
def deberta_attention(site: Site) -> Host:
    """DeBERTa: relative positions act on the logits, content with position and position with content."""
    above: Any = site.parent()
    longest = int(config_of(site).max_position_embeddings)
    layer: Any = site.layer
    if hasattr(layer, "in_proj"):  # of the first version, which adds its biases afterwards
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
    """ModernBERT: two layers of three see a window of their neighbours. The memory shows them all that was read."""
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
    """BART and its like, and the encoders of sounds. HuBERT and Wav2Vec2 have no positions of a table."""
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
    """T5's encoder and its like. Heads may be wider or narrower together than the model."""
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
