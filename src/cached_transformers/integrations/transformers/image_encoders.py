"""Adapters for transformers' encoders of images. Imports nothing of transformers.

Legend: B rows, N tokens, H height and W width of a map.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from cached_transformers.checks import insist
from cached_transformers.integrations.hosts import WHOLE, Host, Site, register_adapter
from cached_transformers.integrations.masks import MASKED, map_size, no_mask
from cached_transformers.interfaces.memory import Query

from .config_utils import config_of, first_of, in_transformers, softmax_of
from .encoder_streams import image_stream
from .encoders import encoder_host


def patch_host(site: Site, prefix: int, *, bias: bool = False, surrounds: bool = False) -> Host:
    """What encoders of patches have in common: a slot for every token.

    Args:
        prefix: tokens in front of the map. bias: whether the layer's mask is a bias, which hides nothing.
        surrounds: whether tokens of a memory may stand round those of an image.
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
        # Traced code gets a mask even where nothing is hidden; whether that is so, only a run can tell.
        visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask >= 0
        insist(visible.all(), MASKED)
    else:
        no_mask(attention_mask)
    return Query(hidden_states, size=map_size(hidden_states.shape[1], prefix, grid))


def _biased_query(
    grid: tuple[int, int], prefix: int, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any
) -> Query:
    return Query(hidden_states, size=map_size(hidden_states.shape[1], prefix, grid))


@register_adapter(*in_transformers("vit.ViTAttention", "vit_msn.ViTMSNAttention", "dinov2.Dinov2Attention"))
def vit_attention(site: Site) -> Host:
    """ViT, MSN and DINOv2: one class token in front of the patches."""
    return patch_host(site, 1, surrounds=True)


@register_adapter(*in_transformers("deit.DeiTAttention"))
def deit_attention(site: Site) -> Host:
    """DeiT: a class token and one for distillation."""
    return patch_host(site, 2, surrounds=True)


@register_adapter(*in_transformers("ijepa.IJepaAttention"))
def ijepa_attention(site: Site) -> Host:
    """I-JEPA: patches alone."""
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
    """CLIP's images. Its texts are causal, and left as they are."""
    if hasattr(config_of(site), "image_size"):
        return patch_host(site, 1)
    if not hasattr(site.model, "vision_model") and not hasattr(getattr(site.model, "config", None), "vision_config"):
        raise ValueError(
            f"{type(site.model).__name__} reads causally, and has no place for a state: a shared memory would show a "
            "token what follows it; CLIP's encoder of images takes one"
        )
    return None


@register_adapter(*in_transformers("siglip.SiglipAttention"))
def siglip_attention(site: Site) -> Host:
    """SigLIP: images of patches alone; texts that see themselves as a whole."""
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
