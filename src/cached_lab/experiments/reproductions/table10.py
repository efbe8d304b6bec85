"""Table 10: the cache's share of the channels, from none to all.

In the released code the positional convolution has as many groups as the cache has channels, so the smallest cache
comes with the largest convolution. Each share therefore has its own convolution as a control, and its own plain model
at equal cost.
"""

from __future__ import annotations

from collections.abc import Sequence

from .base import TableRow
from .images import PAPER, Backbone, image_table

RATIOS = (0.125, 0.25, 0.5, 1.0)
SMALL = Backbone("pvt_v2")
"""Backbone of the small scale; a PVT of this size, the paper's backbone, hardly learns."""


def backbone_rows(backbone: Backbone) -> list[TableRow]:
    """Return the plain backbone, and for each share GRC, only its convolution, and the plain backbone at equal cost."""
    rows = [backbone.plain()]
    for ratio in RATIOS:
        share, convolution, wider = f"r={ratio:g}", f"r={ratio:g}-convolution", f"r={ratio:g}-wider"
        against = (backbone.name, *(f"{backbone.name}-{control}" for control in (convolution, wider)))
        rows += [
            backbone.row(share, {"variant": "released", "ratio": ratio}, against=against),
            backbone.row(convolution, {"name": "convolution", "ratio": ratio}),
            backbone.row(wider, None, matched=f"{backbone.name}-{share}"),
        ]
    return rows


def _rows(scale: str) -> Sequence[TableRow]:
    return backbone_rows(PAPER["pvt_tiny"] if scale == "paper" else SMALL)


TABLE10 = image_table(
    "images: the share of the channels that the cache has, from none to all",
    _rows,
    recipes={"small": "table10_small", "paper": "imagenet_pvt_tiny_grc"},
)
