"""Adapter for torchvision's Swin, whose layers pass their weights to a function and never call their projection as a
module. So the layer gets a forward of its own (arXiv:2103.14030, section 3.2; V2: arXiv:2111.09883, section 3.1;
original: github.com/microsoft/Swin-Transformer). Imports nothing of torchvision.

Rows are windows of all images, and the cache is one window; only the self branch sees the shift mask.

Legend: B images, Y height, X width, W windows, N tokens of a window, H heads, E head width, D = H * E.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.interfaces.incremental import read_segment
from cached_transformers.interfaces.memory import LayerMemory, Query
from cached_transformers.linear_maps import plain_weights

from .hosts import Host, HostAttention, Site, register_adapter
from .memory_lookup import memory_of, refuse_frozen

APART = -100.0
"""Added to the logits of tokens that the shift brought side by side; torchvision's number."""


@register_adapter(
    "torchvision.models.swin_transformer.ShiftedWindowAttention",
    "torchvision.models.swin_transformer.ShiftedWindowAttentionV2",
)
def shifted_window_attention(site: Site) -> Host:
    """Swin, and Swin V2, whose keys have no bias and whose logits are cosines."""
    layer = site.layer
    window = (int(layer.window_size[0]), int(layer.window_size[1]))
    facts: dict[str, Any] = {"length": window[0] * window[1], "size": window}
    facts |= {"dropout": float(layer.attention_dropout), "bias": layer.qkv.bias is not None}
    if site.settings.get("variant") == "released":  # the memory branch has a table of relative positions, too
        facts["window"] = window
    attention = HostAttention(refusal=f"{type(layer).__name__} computes its logits and their softmax itself")
    width = int(layer.qkv.in_features)
    return Host(width, layer.num_heads, None, Query, facts, _install, _uninstall, attention)


def _install(layer: nn.Module, memory: LayerMemory) -> None:
    vars(layer)["forward"] = partial(_forward, layer)


def _uninstall(layer: nn.Module) -> None:
    vars(layer).pop("forward", None)


def _forward(layer: Any, x: Tensor) -> Tensor:
    """The layer's forward, (B, Y, X, D) -> (B, Y, X, D)."""
    memory: Any = memory_of(layer)
    refuse_frozen(memory, x)
    images, height, width, _ = x.shape
    window = tuple(layer.window_size)
    fill = [-side % w for side, w in zip((height, width), window, strict=True)]
    sides = (height + fill[0], width + fill[1])
    x = F.pad(x, (0, 0, 0, fill[1], 0, fill[0]))
    # A window as large as the map sees all of it without a shift.
    shift = tuple(s if w < side else 0 for s, w, side in zip(layer.shift_size, window, sides, strict=True))
    x_BND = _windows(x.roll((-shift[0], -shift[1]), (1, 2)), window)
    q, k, v = _projected(layer, x_BND)
    bias = layer.get_relative_position_bias().to(q.dtype)
    if any(shift):
        apart_WNN = _apart(sides, window, shift, x.device).to(q.dtype)
        bias = (bias + apart_WNN[:, None] * APART).repeat(images, 1, 1, 1)
    dropout = layer.attention_dropout if layer.training else 0.0
    scale = 1.0 if hasattr(layer, "logit_scale") else None
    y_BHNE = F.scaled_dot_product_attention(q, k, v, bias.expand(len(q), -1, -1, -1), dropout, scale=scale)
    query = Query(x_BND, q, size=window)
    reading = read_segment(memory, (), query, None)
    y_BND = memory.project(y_BHNE, query, reading, layer.proj, plain_weights(layer.proj))
    y_BND = F.dropout(y_BND, layer.dropout, layer.training)
    down, across = (side // w for side, w in zip(sides, window, strict=True))  # and the inverse of `_windows`
    y = y_BND.unflatten(1, window).unflatten(0, (-1, down, across)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return y.roll(shift, (1, 2))[:, :height, :width].contiguous()


def _projected(layer: Any, x_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values; in V2 the products of the first two are scaled cosines."""
    scale = getattr(layer, "logit_scale", None)
    q, k, v = (t.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2) for t in layer.qkv(x_BND).chunk(3, -1))
    if scale is None:
        return q, k, v
    if layer.qkv.bias is not None:
        k = k - layer.qkv.bias.chunk(3)[1].unflatten(-1, (layer.num_heads, 1, -1))
    factor = scale.clamp(max=math.log(100.0)).exp()
    return F.normalize(q, dim=-1) * factor, F.normalize(k, dim=-1), v


def _windows(x: Tensor, window: tuple[int, ...]) -> Tensor:
    """(B W, N, ...) of maps (B, Y, X, ...), whose sides are multiples of the window's."""
    x = x.unflatten(2, (-1, window[1])).unflatten(1, (-1, window[0])).transpose(2, 3)
    return x.flatten(3, 4).flatten(0, 2)


def _apart(sides: tuple[int, int], window: tuple[int, ...], shift: tuple[int, ...], device: torch.device) -> Tensor:
    """(W, N, N) bool: tokens of one window that were not side by side before the shift."""
    parts = []
    for side, w, s in zip(sides, window, shift, strict=True):
        place = torch.arange(side, device=device)
        parts.append((place >= side - w).long() + ((place >= side - s) & (s > 0)).long())
    region_WN = _windows((parts[0][:, None] * 3 + parts[1])[None, ..., None], window)[..., 0]
    return region_WN[:, :, None] != region_WN[:, None]
