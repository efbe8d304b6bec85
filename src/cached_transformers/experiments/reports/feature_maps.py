"""What the self branch and the memory branch of GRC attention see in an image (arXiv:2312.12742, figure 4).

Legend: L layers, N images, H heads, T tokens, E head width, h x w token map.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from cached_transformers.memories.parts.cached_attention import CachedAttention

Pair = tuple[Tensor, Tensor]


@contextlib.contextmanager
def record_branches(model: nn.Module) -> Iterator[list[list[Pair]]]:
    """Inside, forwards note per-head results (y_BHNE, o_BHNF) of self and memory branch, a list a cached layer."""
    memories = [m for m in model.modules() if isinstance(m, CachedAttention)]
    notes: list[list[Pair]] = [[] for _ in memories]
    for memory, note in zip(memories, notes, strict=True):
        memory.branch.record = lambda y, o, note=note: note.append((y.detach(), o.detach()))
    try:
        yield notes
    finally:
        for memory in memories:
            memory.branch.record = None


class LayerMaps(NamedTuple):
    """What a cached layer's branches give each place of the images: norms over heads and channels, (N, h, w) each."""

    number: int
    name: str
    own: np.ndarray
    memory: np.ndarray


@torch.no_grad()
def collect_layer_maps(model: nn.Module, images_NCHW: Tensor) -> list[LayerMaps]:
    """Maps of all cached layers in evaluation mode; layers are counted from 1, in order of the model.

    Layers are left out whose rows are not images (windows), or whose tokens are no map of the images' shape.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    with record_branches(model) as notes:
        model(images_NCHW)
    for module, mode in modes:
        if module.training != mode:
            module.train(mode)
    n, _, height, width = images_NCHW.shape
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, CachedAttention)]
    found = []
    for number, ((name, memory), pairs) in enumerate(zip(layers, notes, strict=True), start=1):
        for y, o in pairs[:1]:
            both = [_map(t, memory.cache.prefix, height / width) for t in (y, o)]
            if y.shape[0] == n and both[0] is not None and both[1] is not None:
                found.append(LayerMaps(number, name, both[0], both[1]))
    return found


def collect_feature_maps(model: nn.Module, images_NCHW: Tensor) -> dict[str, np.ndarray] | None:
    """Norms of the two branches' features at each place of the map, in evaluation mode.

    Returns:
        {"image": (N, H, W, C) in 0..1, "self": (L, N, h, w), "memory": (L, N, h, w)} of the layers with the first
        layer's map; None for a model without GRC layers, or whose rows are not images (windows).
    """
    maps = collect_layer_maps(model, images_NCHW)
    maps = [layer for layer in maps if layer.own.shape == maps[0].own.shape]
    if not maps:
        return None
    low = images_NCHW.amin((1, 2, 3), keepdim=True)
    high = images_NCHW.amax((1, 2, 3), keepdim=True)
    scaled = (images_NCHW - low) / (high - low).clamp(min=1e-6)
    return {
        "image": scaled.permute(0, 2, 3, 1).float().cpu().numpy(),
        "self": np.stack([layer.own for layer in maps]),
        "memory": np.stack([layer.memory for layer in maps]),
    }


def _map(t_BHTE: Tensor, prefix: int, aspect: float) -> np.ndarray | None:
    """(B, h, w) norms over heads and channels of the tokens behind the class tokens; None when they form no map.

    Args:
        aspect: height by width of the images, which is that of the map to within a row.
    """
    norms = t_BHTE[:, :, prefix:].float().pow(2).sum((1, 3)).sqrt()
    cells = norms.shape[1]
    likely = (cells * aspect) ** 0.5
    heights = [h for h in range(1, cells + 1) if cells % h == 0 and abs(h - likely) < 1]
    if not heights:
        return None
    height = min(heights, key=lambda h: abs(h - likely))
    return norms.unflatten(1, (height, cells // height)).cpu().numpy()
