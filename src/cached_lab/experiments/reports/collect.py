"""Data for figures of a trained model: gates, and maps of self-attention's and the memory's outputs.

Figures 5 and 4 of "Cached Transformers" (arXiv:2312.12742). Any module with the methods is drawn:

    mixing_ratio()  (H,): the share of the memory in each head, from 0 (self-attention only) to 1
    record(note)    call note(y_BHTE, o_BHTE), the outputs of self-attention and memory, at each forward, until None
    prefix          tokens before the tokens of the map, such as class tokens

Legend: N images, H heads, T tokens, E head width, h x w token map.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from cached_lab.training.metrics import untouched


class LayerMaps(NamedTuple):
    """Norms of both branches' outputs over heads and channels, (N, h, w) each; layers count from 1."""

    number: int
    name: str
    self_attention: np.ndarray
    memory: np.ndarray


def collect_gates(model: nn.Module) -> list[list[float]]:
    """The memory's share, head by head, of each gated layer, from the first to the last."""
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "mixing_ratio")]
    ratios = [module.mixing_ratio() for module in modules]
    return [ratio.detach().float().tolist() for ratio in ratios if ratio is not None]


def collect_layer_maps(model: nn.Module, images_NCHW: Tensor) -> list[LayerMaps]:
    """Maps of all layers that record their outputs, in evaluation mode, in order of the model.

    Layers are left out if their rows are not images (windows), or their tokens no map of the images' shape.
    """
    named: list[tuple[str, Any]] = list(model.named_modules())
    memories = {name: module for name, module in named if hasattr(module, "record") and hasattr(module, "prefix")}
    notes: dict[str, tuple[Tensor, Tensor]] = {}
    with ExitStack() as stack:
        stack.enter_context(untouched(model))
        for name, memory in memories.items():
            memory.record(lambda y_BHTE, o_BHTE, name=name: notes.update({name: (y_BHTE, o_BHTE)}))
            stack.callback(memory.record, None)
        model(images_NCHW)
    n, _, height, width = images_NCHW.shape
    found = []
    for number, (name, memory) in enumerate(memories.items(), start=1):
        maps = [_map(t_BHTE, memory.prefix, height / width) for t_BHTE in notes.get(name, ()) if len(t_BHTE) == n]
        if len(maps) == 2 and maps[0] is not None and maps[1] is not None:
            found.append(LayerMaps(number, name, maps[0], maps[1]))
    return found


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
