"""Memory shares of heads and layers, and maps of the two branches' outputs.

Counterparts of figures 4 and 5 of "Cached Transformers" (arXiv:2312.12742).
Shapes: N images, H W their pixels, C colours, L layers, h w the tokens' grid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cached_transformers.extras import require

from .style import MUTED, blank_figure, looks, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = npt.NDArray[np.floating[Any]]


def gates(layers_by_variant: Mapping[str, Sequence[Sequence[Sequence[float]]]], reference: str | None = None) -> Figure:
    """Memory share sigma(lambda): heat map of layers and heads (first seed), mean per layer (a line per seed).

    Args:
        layers_by_variant: for each variant, for each seed, for each layer the shares of its heads, in 0..1. Layers may
            differ in their number of heads. Heads have no fixed order over seeds, so only means are compared.
    """
    shares = [x for seeds in layers_by_variant.values() for layers in seeds for heads in layers for x in heads]
    if not shares or not all(0 <= x <= 1 for x in shares):
        raise ValueError("gates must hold one share in 0..1 per head for at least one layer")
    colours = require("matplotlib.colors", extra="plot")
    ramp = colours.LinearSegmentedColormap.from_list("memory share", ["#eef3f7", "#56a3cf", "#0b3d63"])
    rows, most_layers = len(layers_by_variant), max(len(seeds[0]) for seeds in layers_by_variant.values())
    figure, axes = blank_figure(7.6, rows * (1.1 + 0.42 * most_layers), rows, 2, widths=[1.25, 1])
    with style():
        for (name, seeds), row in zip(layers_by_variant.items(), axes, strict=True):
            _draw_gate_map(row[0], seeds[0], ramp)
            row[0].set(title=f"{name}: memory share by head", xlabel="head", ylabel="layer")
            colour = looks(layers_by_variant, reference)[name].colour
            for layers in seeds:
                row[1].plot([np.mean(h) for h in layers], range(len(layers)), color=colour, marker="o", ms=4, lw=1.4)
            row[1].axvline(0.5, color=MUTED, lw=0.8, ls=(0, (4, 3)))
            title = f"mean by layer, {len(seeds)} seed{'s' * (len(seeds) > 1)}"
            row[1].set(title=title, xlabel="0 self, 1 memory", xlim=(0, 1))
            row[1].set(ylim=row[0].get_ylim(), yticks=row[0].get_yticks())
            row[1].set_yticklabels([t.get_text() for t in row[0].get_yticklabels()])
    return figure


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


def _draw_gate_map(ax: Axes, layers: Sequence[Sequence[float]], ramp: Any) -> None:
    shares = np.full((len(layers), max(len(heads) for heads in layers)), np.nan)
    for i, heads in enumerate(layers):
        shares[i, : len(heads)] = heads
    ax.imshow(np.ma.masked_invalid(shares), cmap=ramp, vmin=0, vmax=1, aspect="auto")
    if shares.shape[1] <= 12:
        for (i, j), share in np.ndenumerate(shares):
            if not math.isnan(share):
                ink = "#ffffff" if share > 0.55 else "#111111"
                ax.text(j, i, f"{share:.2f}", ha="center", va="center", fontsize=8, color=ink)
    ax.set_xticks(range(shares.shape[1]), [str(j + 1) for j in range(shares.shape[1])])
    ax.set_yticks(range(shares.shape[0]), [str(i + 1) for i in range(shares.shape[0])])
    ax.tick_params(length=0)
    ax.grid(False)
    ax.spines[:].set_visible(False)
