"""Adapters for timm's attention layers, and for this package's PVT. Imports nothing of timm."""

from __future__ import annotations

import inspect
import re
from functools import partial
from typing import Any

from torch import Tensor, nn

from cached_transformers.integrations.hosts import Host, HostAttention, Site, Stream, register_adapter, register_left
from cached_transformers.integrations.masks import map_size, no_mask
from cached_transformers.integrations.segment_context import running
from cached_transformers.interfaces.memory import Query
from cached_transformers.layers.reduction import PooledReduction, SpatialReduction
from cached_transformers.memories.parts.interpolation import coarser_reduction

from .frames import add_frame_memory


def in_timm(names: str) -> list[str]:
    """Full names of classes of timm."""
    return [f"timm.{name}" for name in names.split()]


VITS = """
    layers.attention.Attention layers.attention.AttentionRope models.vision_transformer.Attention
    models.beit.Attention models.cait.TalkingHeadAttn models.eva.EvaAttention
"""
SWINS = (
    "models.swin_transformer.WindowAttention models.swin_transformer_v2.WindowAttention models.davit.WindowAttention"
)


@register_adapter(*in_timm(VITS))
def vit_attention(site: Site) -> Host:
    """ViT and DeiT, BEiT, CaiT, EVA-02 and DINOv3: class tokens and registers before the grid of patches, a slot for
    every token. Rotary positions and biases apply only to the layer's own attention."""
    layer, body = site.layer, site.holder("patch_embed")
    patches = getattr(body, "patch_embed", None)
    if type(body).__module__ == "timm.models.pit":
        raise ValueError("PiT pools its map between its stages, which its layers do not tell; take a ViT or a PVT")
    # CaiT's class token joins the patches after its layers of this kind.
    prefix = 0 if hasattr(layer, "proj_l") else int(getattr(body, "num_prefix_tokens", 0))
    query = layer.q_proj if getattr(layer, "qkv", None) is None else layer.qkv
    facts: dict[str, Any] = _branch(layer, query) | {"prefix": prefix}
    grid = Grid(patches, prefix) if getattr(patches, "grid_size", None) is not None else None
    if grid is not None and "length" not in site.settings:
        height, width = grid.built
        facts |= {"length": height * width + prefix, "size": (height, width)}
    else:
        facts |= {"length": site.length()}
    width, merged = query.in_features, layer.proj.in_features
    asks = ("bias",) if getattr(layer, "relative_position_bias_table", None) is not None else ()
    read = partial(_vit_query, grid, tuple(inspect.signature(type(layer).forward).parameters)[1:])
    host = Host(width, layer.num_heads, layer.proj, read, facts, attention=_attention(layer, *asks))
    if type(body).__module__ in ("timm.models.vision_transformer", "timm.models.deit") and hasattr(layer, "q_norm"):
        sources = ((layer.q_norm,), (layer.k_norm,), (layer.qkv,))
        host.stream = Stream(add_frame_memory, site.block(), sources, _parts, causal=False, cuts=False)
        host.offers |= {"state"}
    _refuse_width(site, width, merged)
    if grid is not None and getattr(body, "dynamic_img_size", False):
        host.watch = (grid.patches, grid.see)
    return host


def _parts(q_BHNE: Tensor, k_BHNE: Tensor, qkv_BNL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys after their norms, and values of the projection of all three."""
    v_BND = qkv_BNL.chunk(3, -1)[2]
    return q_BHNE, k_BHNE, v_BND.unflatten(-1, (q_BHNE.shape[1], -1)).transpose(1, 2)


class Grid:
    """The map of a ViT's tokens: that of the last image, or the one that the model was built for.

    Args:
        patches: timm's patch embedding. prefix: class tokens before the map.
    """

    def __init__(self, patches: Any, prefix: int) -> None:
        self.patches, self.prefix = patches, prefix

    @property
    def built(self) -> tuple[int, int]:
        """(height, width) that the model was built for; timm's `set_input_size` changes it."""
        height, width = self.patches.grid_size
        return int(height), int(width)

    def see(self, patches: Any, args: tuple[Tensor, ...]) -> None:
        """Record the map of the images that enter (with dynamic_img_size): a hook of the patch embedding."""
        height, width = patches.dynamic_feat_size(tuple(args[0].shape[-2:]))
        running().grid = (patches, (int(height), int(width)))

    def of(self, tokens: int) -> tuple[int, int] | None:
        """The map of this number of tokens, or None where they are no map (patch dropout)."""
        seen = running().grid
        if seen is not None and seen[0] is self.patches:
            height, width = seen[1]
            if height * width + self.prefix == tokens:
                return height, width
        return map_size(tokens, self.prefix, self.built)


def _vit_query(grid: Grid | None, names: tuple[str, ...], x: Tensor, *others: Any, **given: Any) -> Query:
    """`names` are those of the layer's arguments: those after `x` differ, a mask must not be overlooked."""
    given |= dict(zip(names[1:], others, strict=False))
    no_mask(given.get("attn_mask"), given.get("is_causal", False))
    return Query(x, size=grid.of(x.shape[1]) if grid is not None else None)


@register_adapter(*in_timm(SWINS))
def swin_attention(site: Site) -> Host:
    """Swin and DaViT: rows are windows of all images, and the cache is one window; only the self branch sees the shift
    mask."""
    layer = site.layer
    window = (int(layer.window_size[0]), int(layer.window_size[1]))
    width, query = layer.qkv.in_features, partial(_swin_query, window)
    facts = _branch(layer, layer.qkv) | {"length": window[0] * window[1], "size": window}
    if site.settings.get("variant") == "released":  # the memory branch has a table of relative positions, too
        facts["window"] = window
    _refuse_width(site, width, layer.proj.in_features)
    return Host(width, layer.num_heads, layer.proj, query, facts, attention=_attention(layer, "bias"))


def _swin_query(window: tuple[int, int], x: Tensor, mask: Tensor | None = None) -> Query:
    return Query(x, size=window)


@register_adapter("timm.models.pvt_v2.Attention")
def pvt_v2_attention(site: Site) -> Host:
    """PVTv2: the cache holds unreduced tokens of the stage; keys and values are reduced as those of the self branch."""
    layer = site.layer
    size = _stage_size(site)
    if site.memory and layer.pool is not None:
        reduction: nn.Module | None = PooledReduction(_cache_width(site, layer.dim))
    else:
        reduction = _reduction(site)
    facts = _branch(layer, layer.q) | {"length": size[0] * size[1], "size": size, "reduction": reduction}
    attention = _attention(layer, *(("cross",) if layer.pool is not None or layer.sr is not None else ()))
    return Host(layer.dim, layer.num_heads, layer.proj, _pvt_query, facts, attention=attention)


@register_adapter("cached_transformers.models.pvt.layers.SpatialReductionAttention")
def pvt_attention(site: Site) -> Host:
    """PVT: like PVTv2, with a class token in the last stage; the layer knows the map it was built for."""
    layer = site.layer
    height, width = _pvt_size(site)
    facts = _branch(layer, layer.q) | {"size": (height, width), "prefix": layer.prefix, "reduction": _reduction(site)}
    facts["length"] = height * width + layer.prefix
    asks = frozenset({"bidirectional", *(("cross",) if layer.sr is not None else ())})  # fewer keys than queries
    attention = HostAttention(asks, float(layer.attn_drop.p))
    return Host(layer.dim, layer.num_heads, layer.proj, _pvt_query, facts, attention=attention)


def _pvt_size(site: Site) -> tuple[int, int]:
    """(height, width) of this layer's map: the one it was built for, or that of images of `input_size`."""
    size, named = site.settings.get("input_size"), re.search(r"\bblock(\d+)\b", site.name)
    if size is None or named is None:
        return int(site.layer.size[0]), int(site.layer.size[1])
    stages: Any = site.holder("feature_info").feature_info
    stride = int(stages[int(named[1]) - 1]["reduction"])
    return int(size[0]) // stride, int(size[1]) // stride


def _pvt_query(x_BND: Tensor, size: Any) -> Query:
    return Query(x_BND, size=(int(size[0]), int(size[1])))


def _branch(layer: Any, query: Any) -> dict[str, Any]:
    """Options that the memory branch shares with the layer: dropout of weights, biases of queries, keys and values."""
    biased = query.bias is not None or getattr(layer, "q_bias", None) is not None
    return {"dropout": _dropout(layer), "bias": biased}


def _dropout(layer: Any) -> float:
    return float(layer.attn_drop.p) if hasattr(layer, "attn_drop") else 0.0


def _cache_width(site: Site, width: int) -> int:
    """Channels of the cache of a layer of this width; the memory itself refuses ratios that do not fit."""
    ratio = site.settings.get("ratio", 0.5)
    return max(int(ratio * width + 1e-6), 1) if 0 < ratio <= 1 else 1


def _reduction(site: Site) -> SpatialReduction | None:
    """The layer's reduction of its keys and values; a cache with a stride has fewer slots and needs less of it."""
    layer = site.layer
    if not site.memory or layer.sr is None:
        return None
    ratio = coarser_reduction(layer.sr.kernel_size[0], site.settings.get("stride", 1))
    return SpatialReduction(_cache_width(site, layer.dim), ratio) if ratio > 1 else None


def _stage_size(site: Site) -> tuple[int, int]:
    """(height, width) of the token map in the stage of this layer, for the model's usual image."""
    usual = getattr(site.holder("pretrained_cfg"), "pretrained_cfg", {}).get("input_size", (3, 224, 224))[1:]
    height, width = (int(side) for side in site.settings.get("input_size") or usual)
    named = re.search(r"\bstages[._](\d+)", site.name)  # timm's features_only=True names them stages_0, ...
    for index in range(int(named[1]) + 1 if named else 1):
        stride = 4 if index == 0 else 2
        height, width = -(-height // stride), -(-width // stride)
    return height, width


def _attention(layer: Any, *asks: str) -> HostAttention:
    """timm's layers have an attention of their own beside the fused one, which Swin uses by default."""
    words = frozenset({"bidirectional", *asks})
    if hasattr(layer, "fused_attn"):
        return HostAttention(words, _dropout(layer), switches={"fused_attn": True})
    return HostAttention(words, refusal=f"{type(layer).__name__} computes its logits and their softmax itself")


def _refuse_width(site: Site, width: int, merged: int) -> None:
    if width != merged:
        site.refuse(
            f"{type(site.layer).__name__}: heads of {merged} channels in all on tokens of {width}; the memory reads "
            "the first channels of the tokens for each head and needs them equal"
        )


LEFT = """
    layers.attention_pool.AttentionPoolLatent layers.attention_pool.AttentionPoolPrr
    layers.attention_pool2d.AttentionPool2d layers.attention_pool2d.RotAttentionPool2d layers.cbam.ChannelAttn
    layers.cbam.SpatialAttn layers.coord_attn.CoordAttn layers.coord_attn.EfficientLocalAttn
    layers.coord_attn.SimpleCoordAttn layers.coord_attn.StripAttn layers.selective_kernel.SelectiveKernelAttn
    layers.split_attn.SplitAttn models.cait.ClassAttn models.davit.ChannelAttention
    models.davit.ChannelAttentionV2
"""
"""Pooling by one query, and weights for channels or for places of a map, beside layers that attend or convolve."""
register_left(*in_timm(LEFT))
