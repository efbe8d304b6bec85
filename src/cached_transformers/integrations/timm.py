"""Adapters for timm's attention layers: ViT and DeiT, Swin, PVTv2. Imports nothing of timm."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from ..layers.reduction import PooledReduction, SpatialReduction
from ..memories.base import Query
from .adapters import Host, Inner, Site, map_size, no_mask, register_adapter


@register_adapter("timm.layers.attention.Attention", "timm.models.vision_transformer.Attention")
def vit_attention(site: Site) -> Host:
    """ViT and DeiT: class tokens in front of the grid of patches, a slot for every token."""
    layer, model = site.layer, site.model
    patches = getattr(model, "patch_embed", None)
    grid = getattr(patches, "grid_size", None)
    prefix = int(getattr(model, "num_prefix_tokens", 0))
    known: dict[str, Any] = {"prefix": prefix}
    if grid is not None and "length" not in site.settings:
        grid = (int(grid[0]), int(grid[1]))
        known |= {"length": grid[0] * grid[1] + prefix, "size": grid}
    else:
        known |= {"length": site.length()}
    width, query = layer.qkv.in_features, partial(_vit_query, prefix, grid)
    refusal = _other_width(layer, width, layer.proj.in_features)
    return Host(width, layer.num_heads, layer.proj, query, known, inner=_inner(layer), refusal=refusal)


def _vit_query(
    prefix: int, grid: tuple[int, int] | None, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Query:
    no_mask(attn_mask, is_causal)
    return Query(x, size=map_size(x.shape[1], prefix, grid) if grid is not None else None)


@register_adapter("timm.models.swin_transformer.WindowAttention")
def swin_attention(site: Site) -> Host:
    """Swin: rows are windows of all images, and the cache is one window; only the self branch sees the shift mask."""
    layer = site.layer
    window = (int(layer.window_size[0]), int(layer.window_size[1]))
    width, query = layer.qkv.in_features, partial(_swin_query, window)
    known = {"length": window[0] * window[1], "size": window}
    refusal = _other_width(layer, width, layer.proj.in_features)
    return Host(width, layer.num_heads, layer.proj, query, known, inner=_inner(layer, bias=True), refusal=refusal)


def _swin_query(window: tuple[int, int], x: Tensor, mask: Tensor | None = None) -> Query:
    return Query(x, size=window)


@register_adapter("timm.models.pvt_v2.Attention")
def pvt_v2_attention(site: Site) -> Host:
    """PVTv2: the cache holds unreduced tokens of the stage; keys and values are reduced as those of the self branch."""
    layer = site.layer
    size = _stage_size(site)
    width = int(site.settings.get("ratio", 0.5) * layer.dim)
    reduced = layer.pool is not None or layer.sr is not None
    reduction: nn.Module | None = None
    if not site.memory:
        pass  # the layer reduces its own keys and values
    elif layer.pool is not None:
        reduction = PooledReduction(width)
    else:
        reduction = SpatialReduction(width, layer.sr.kernel_size[0]) if layer.sr is not None else None
    known = {"length": size[0] * size[1], "size": size, "reduction": reduction}
    return Host(layer.dim, layer.num_heads, layer.proj, _pvt_v2_query, known, inner=_inner(layer, cross=reduced))


def _pvt_v2_query(x: Tensor, feat_size: Any) -> Query:
    return Query(x, size=(int(feat_size[0]), int(feat_size[1])))


def _stage_size(site: Site) -> tuple[int, int]:
    """(height, width) of the token map in the stage of this layer, for the model's usual image."""
    size = (
        site.settings.get("input_size")
        or getattr(site.model, "pretrained_cfg", {}).get("input_size", (3, 224, 224))[1:]
    )
    height, width = int(size[0]), int(size[1])
    stage = int(site.name.split("stages.")[-1].split(".")[0]) if "stages." in site.name else 0
    for index in range(stage + 1):
        stride = 4 if index == 0 else 2
        height, width = -(-height // stride), -(-width // stride)
    return height, width


def _inner(layer: Any, **facts: Any) -> Inner:
    """timm's layers have attention of their own beside the fused one, which Swin takes unless told otherwise."""
    return Inner(float(layer.attn_drop.p), switches={"fused_attn": True}, **facts)


def _other_width(layer: nn.Module, width: int, merged: int) -> str | None:
    if width == merged:
        return None
    return (
        f"{type(layer).__name__}: heads of {merged} channels in all on tokens of {width}; the memory reads the "
        "first channels of the tokens for each head and needs them equal"
    )
