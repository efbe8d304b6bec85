"""Table 1: image classification, each backbone plain and with GRC, and with controls that the paper lacks.

The paper trains each pair once, on ImageNet. Here there are several seeds with the same data order, and for each cached
model the plain one with the same convolution and the plain one at equal cost (`images.Backbone`). The small scale is
CIFAR-10 with small models.
"""

from __future__ import annotations

from collections.abc import Sequence

from .base import TableRow
from .images import PAPER, SMALL, image_table


def _rows(scale: str) -> Sequence[TableRow]:
    backbones = PAPER if scale == "paper" else SMALL
    return [row for backbone in backbones.values() for row in backbone.rows()]


TABLE1 = image_table(
    "images: backbones plain, with GRC, with only its convolution, and plain at equal operations",
    _rows,
    recipes={"small": "table1_small", "paper": "imagenet_vit_small_grc"},
)
