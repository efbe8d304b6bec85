"""Table 8: a shifted-window backbone (Swin) plain and with GRC, with many classes: ImageNet-22k in the paper.

The cache of such a layer is one window, the mean over all windows of all images. The small scale is Tiny-ImageNet at
32 x 32 pixels with a small Swin. The paper's scale trains on ImageNet-22k and scores held-out images; the paper then
fine-tunes each model on ImageNet-1k, as `imagenet22k_swin_tiny_grc_finetune` does with a run of this table as
`training.initial_weights`.
"""

from __future__ import annotations

from collections.abc import Sequence

from .base import TableRow
from .images import Backbone, image_table

SMALL = Backbone("swin")
PAPER = Backbone("swin_tiny", recipe="imagenet22k_swin_tiny_grc", options={"mlp_ratio": 4.0})


def _rows(scale: str) -> Sequence[TableRow]:
    return (PAPER if scale == "paper" else SMALL).rows()


TABLE8 = image_table(
    "images, many classes: Swin plain, with GRC, with only its convolution, and plain at equal operations",
    _rows,
    recipes={"small": "table8_small", "paper": "imagenet22k_swin_tiny_grc"},
    files={"small": "Tiny-ImageNet (64 or 32 pixels)", "paper": "ImageNet-22k (a tar for each class)"},
)
