"""Pictures beside maps of the two branches' outputs.

Shapes: N images, H W their pixels, C colours, L layers, h w the tokens' grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .style import MUTED, blank_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = npt.NDArray[np.floating[Any]]


def feature_maps(image: Array, self_maps: Array, memory_maps: Array, images: int = 4, layers: int = 3) -> Figure:
    """Input, self-attention and memory outputs side by side: rows are images, columns layers from early to late.

    Each map has its own scale from its least to its greatest value: compare places, not strengths.

    Args:
        image: (N, H, W, C) in 0..1, C 1 or 3.
        self_maps, memory_maps: (L, N, h, w).
        images, layers: the most to show.
    """
    pictures = image.ndim == 4 and image.shape[-1] in (1, 3) and len(image) > 0
    maps_fit = self_maps.ndim == 4 and self_maps.shape == memory_maps.shape and len(self_maps) > 0
    if not (pictures and maps_fit and self_maps.shape[1] == len(image)):
        raise ValueError(
            f"feature maps need image (N, H, W, 1 or 3) and two arrays (L, N, h, w); got {image.shape}, "
            f"{self_maps.shape} and {memory_maps.shape}"
        )
    shown = np.unique(np.linspace(0, len(self_maps) - 1, min(layers, len(self_maps))).round().astype(int))
    kinds = (("self", self_maps), ("memory", memory_maps))
    maps = [(f"{kind}, layer {layer + 1}", data[layer]) for layer in shown for kind, data in kinds]
    return map_grid(image[:images], maps, "input", (1.25, 1.3, 0.3))


def map_grid(
    images: Array, maps: Sequence[tuple[str, Array]], title: str, size: tuple[float, float, float], ends: bool = False
) -> Figure:
    """A row per image, with its picture and its maps, each on its own scale.

    Args:
        images: (N, H, W, C) in 0..1, C 1 or 3. maps: title and (N or more, h, w) of every further column.
        title: of the column of images. size: width and height of a cell, and the height of the titles, in inches.
        ends: draw without smoothing, and write the ends of each scale below its map.
    """
    width, height, more = size
    figure, axes = blank_figure(width * (1 + len(maps)), height * len(images) + more, len(images), 1 + len(maps))
    look = {"interpolation": "nearest" if ends else None}
    with style():
        for n, row in enumerate(axes):
            picture = np.clip(images[n], 0, 1)
            row[0].imshow(picture[..., 0] if picture.shape[-1] == 1 else picture, cmap="gray", vmin=0, vmax=1, **look)
            for ax, (_, data) in zip(row[1:], maps, strict=True):
                ax.imshow(data[n], cmap="cividis", **look)
                if ends:
                    ax.set_xlabel(f"{data[n].min():.3g} to {data[n].max():.3g}", fontsize=8, color=MUTED, labelpad=3)
            for ax in row:
                ax.set(xticks=[], yticks=[])
                ax.grid(False)
                ax.spines[:].set_visible(False)
        for ax, text in zip(axes[0], [title, *(text for text, _ in maps)], strict=True):
            ax.set_title(text, fontsize=9, loc="center", pad=6)
    return figure
