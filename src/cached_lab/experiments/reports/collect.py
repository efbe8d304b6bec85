"""Data for figures of a trained model: gates, and maps of self-attention's and the memory's outputs.

Figures 5 and 4 of "Cached Transformers" (arXiv:2312.12742). Any memory with the methods is drawn: `mixing_ratio` for
gates, `record` and `prefix` for maps.

Legend: N images, H heads, T tokens, E head width, h x w token map.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from cached_lab.training.metrics import untouched


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
        prefix: tokens before the tokens of the map, such as class tokens.
    """

    @property
    def prefix(self) -> int: ...

    def record(self, note: Callable[[Tensor, Tensor], None] | None) -> None:
        """Call `note(y_BHTE, o_BHTE)` with the outputs of self-attention and memory at each forward; None ends it."""
        ...


class LayerMaps(NamedTuple):
    """Norms of both branches' outputs over heads and channels, (N, h, w) each; layers count from 1."""

    number: int
    name: str
    self_attention: np.ndarray
    memory: np.ndarray


def collect_gates(model: nn.Module) -> list[list[float]]:
    """The memory's share, head by head, of each layer whose memory is `Gated`, from the first layer to the last."""
    return [module.mixing_ratio().detach().float().tolist() for module in model.modules() if isinstance(module, Gated)]


@torch.no_grad()
def collect_layer_maps(model: nn.Module, images_NCHW: Tensor) -> list[LayerMaps]:
    """Maps of all layers whose memory is `Recorded`, in evaluation mode, in order of the model.

    Layers are left out if their rows are not images (windows), or their tokens no map of the images' shape.
    """
    memories = {name: module for name, module in model.named_modules() if isinstance(module, Recorded)}
    notes: dict[str, tuple[Tensor, Tensor]] = {}
    with ExitStack() as stack:
        stack.enter_context(untouched(model))
        model.eval()
        for name, memory in memories.items():
            memory.record(lambda y_BHTE, o_BHTE, name=name: notes.setdefault(name, (y_BHTE, o_BHTE)) and None)  # type: ignore[misc]
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
