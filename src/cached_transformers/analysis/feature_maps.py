"""What the self branch and the memory branch of GRC attention see in an image (arXiv:2312.12742, figure 4).

Legend: L layers, N images, H heads, T tokens, E head width, h x w token map.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from ..memories.cached_attention import CachedAttention

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


@torch.no_grad()
def collect_feature_maps(model: nn.Module, images_NCHW: Tensor) -> dict[str, np.ndarray] | None:
    """Norms of the two branches' features at each place of the map, in evaluation mode.

    Returns:
        {"image": (N, H, W, C) in 0..1, "self": (L, N, h, w), "memory": (L, N, h, w)} of the layers with the first
        layer's map; None for a model without GRC layers, or whose rows are not images (windows).
    """
    training = model.training
    model.eval()
    with record_branches(model) as notes:
        model(images_NCHW)
    model.train(training)
    n = images_NCHW.shape[0]
    maps: list[tuple[np.ndarray, np.ndarray]] = []
    for memory, pairs in zip((m for m in model.modules() if isinstance(m, CachedAttention)), notes, strict=True):
        for y, o in pairs:
            both = [_map(t, memory.cache.prefix) for t in (y, o)]
            if y.shape[0] == n and both[0] is not None and both[1] is not None:
                maps.append((both[0], both[1]))
    maps = [pair for pair in maps if pair[0].shape == maps[0][0].shape]
    if not maps:
        return None
    low = images_NCHW.amin((1, 2, 3), keepdim=True)
    high = images_NCHW.amax((1, 2, 3), keepdim=True)
    scaled = (images_NCHW - low) / (high - low).clamp(min=1e-6)
    return {
        "image": scaled.permute(0, 2, 3, 1).float().cpu().numpy(),
        "self": np.stack([a for a, _ in maps]),
        "memory": np.stack([b for _, b in maps]),
    }


def _map(t_BHTE: Tensor, prefix: int) -> np.ndarray | None:
    """(B, h, w) norms over heads and channels of the tokens behind the class tokens; None when they form no square."""
    norms = t_BHTE[:, :, prefix:].float().pow(2).sum((1, 3)).sqrt()
    side = round(norms.shape[1] ** 0.5)
    return norms.unflatten(1, (side, side)).cpu().numpy() if side * side == norms.shape[1] else None
