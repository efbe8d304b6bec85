"""Data for figures of a trained model: gates, and maps of self-attention's and the memory's outputs.

Figures 5 and 4 of "Cached Transformers" (arXiv:2312.12742). Any memory with the methods is drawn: `mixing_ratio` for
gates, `record` and `prefix` for maps.

Legend: L layers, N images, H heads, T tokens, E head width, h x w token map.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn


@runtime_checkable
class Gated(Protocol):
    """A memory that each head mixes with self-attention in its own ratio."""

    def mixing_ratio(self) -> Tensor:
        """(H,): the share of the memory in each head, from 0 (self-attention only) to 1."""
        ...


@runtime_checkable
class Recorded(Protocol):
    """A memory that reports the outputs it mixes.

    Attributes:
        prefix: tokens before those of the map, such as class tokens.
    """

    @property
    def prefix(self) -> int: ...

    def record(self, note: Callable[[Tensor, Tensor], None] | None) -> None:
        """Call `note(y_BHTE, o_BHTE)` with the outputs of self-attention and memory at each forward; None ends it."""
        ...


class LayerMaps(NamedTuple):
    """Norms of both branches' outputs over heads and channels, (N, h, w) each."""

    number: int
    name: str
    self_attention: np.ndarray
    memory: np.ndarray


def collect_gates(model: nn.Module) -> list[list[float]]:
    """The memory's share, head by head, of each layer whose memory is `Gated`, from the first layer to the last.

    Raises:
        ValueError: a `mixing_ratio` of another shape.
    """
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, Gated):
            ratio_H = module.mixing_ratio().detach().float()
            if ratio_H.dim() != 1:
                raise ValueError(
                    f"mixing_ratio() of {name!r} ({type(module).__name__}) gave shape {tuple(ratio_H.shape)}; it must "
                    "give one share per head, shape (H,)"
                )
            layers.append(ratio_H.tolist())
    return layers


@torch.no_grad()
def collect_layer_maps(model: nn.Module, images_NCHW: Tensor) -> list[LayerMaps]:
    """Maps of all layers whose memory is `Recorded`, in evaluation mode; counted from 1, in order of the model.

    Layers are left out if their rows are not images (windows), or their tokens no map of the images' shape.
    """
    memories = {name: module for name, module in model.named_modules() if isinstance(module, Recorded)}
    notes: dict[str, tuple[Tensor, Tensor]] = {}

    def noting(name: str) -> Callable[[Tensor, Tensor], None]:
        return lambda y_BHTE, o_BHTE: notes.setdefault(name, (y_BHTE.detach(), o_BHTE.detach())) and None

    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    for name, memory in memories.items():
        memory.record(noting(name))
    try:
        model(images_NCHW)
    finally:
        for memory in memories.values():
            memory.record(None)
        for module, mode in modes:
            if module.training != mode:
                module.train(mode)
    n, _, height, width = images_NCHW.shape
    found = []
    for number, (name, memory) in enumerate(memories.items(), start=1):
        maps = [_map(t_BHTE, memory.prefix, height / width) for t_BHTE in notes.get(name, ()) if len(t_BHTE) == n]
        if len(maps) == 2 and maps[0] is not None and maps[1] is not None:
            found.append(LayerMaps(number, name, maps[0], maps[1]))
    return found


def collect_feature_maps(model: nn.Module, images_NCHW: Tensor) -> dict[str, np.ndarray] | None:
    """Norms of the two branches' features at each place of the map, in evaluation mode.

    Returns:
        {"image": (N, H, W, C) in 0..1, "self": (L, N, h, w), "memory": (L, N, h, w)} of the layers whose map has the
        first layer's shape; None for a model without GRC layers, or whose rows are not images (windows).
    """
    maps = collect_layer_maps(model, images_NCHW)
    maps = [layer for layer in maps if layer.self_attention.shape == maps[0].self_attention.shape]
    if not maps:
        return None
    low = images_NCHW.amin((1, 2, 3), keepdim=True)
    high = images_NCHW.amax((1, 2, 3), keepdim=True)
    scaled = (images_NCHW - low) / (high - low).clamp(min=1e-6)
    return {
        "image": scaled.permute(0, 2, 3, 1).float().cpu().numpy(),
        "self": np.stack([layer.self_attention for layer in maps]),
        "memory": np.stack([layer.memory for layer in maps]),
    }


def _map(t_BHTE: Tensor, prefix: int, aspect: float) -> np.ndarray | None:
    """(B, h, w) norms over heads and channels of the tokens after the class tokens; None if they form no map.

    Args:
        aspect: height by width of the images, equal to the map's to within a row.
    """
    norms = t_BHTE[:, :, prefix:].float().pow(2).sum((1, 3)).sqrt()
    cells = norms.shape[1]
    likely = (cells * aspect) ** 0.5
    heights = [h for h in range(1, cells + 1) if cells % h == 0 and abs(h - likely) < 1]
    if not heights:
        return None
    height = min(heights, key=lambda h: abs(h - likely))
    return norms.unflatten(1, (height, cells // height)).cpu().numpy()
