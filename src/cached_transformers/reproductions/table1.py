"""Table 1: image classification, each backbone plain and with GRC, and with the controls that the paper lacks.

The paper trains each pair once, on ImageNet. Here: several seeds with the same order of the data, and beside each
cached model the plain one with the same convolution and the plain one at equal cost (`images.Backbone`). The small
scale is CIFAR-10 with small models.
"""

from __future__ import annotations

from collections.abc import Sequence

from .base import Reproduction, Row
from .images import PAPER, SMALL, protocol

BACKBONES = ("vit", "pvt_v2")
"""Those of the table at small scale; the others are among `others`."""


def _rows(scale: str) -> Sequence[Row]:
    backbones = PAPER.values() if scale == "paper" else [SMALL[name] for name in BACKBONES]
    return [row for backbone in backbones for row in backbone.rows()]


def _others(scale: str) -> Sequence[Row]:
    others = [] if scale == "paper" else [backbone for name, backbone in SMALL.items() if name not in BACKBONES]
    return [row for backbone in others for row in backbone.rows()]


TABLE1 = Reproduction(
    summary="images: backbones plain, with GRC, with its convolution alone, and plain at equal operations",
    recipes={"small": "table1_small", "paper": "imagenet_vit_small_grc"},
    files={"small": "CIFAR-10 (binary version)", "paper": "ImageNet-1k"},
    paper=_rows,
    others=_others,
    equal="operations",
    protocol=protocol,
    cache_use=True,
)
