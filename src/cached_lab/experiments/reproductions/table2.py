"""Table 2: a vision transformer without a cache, with an attention-based cache, and with GRC.

There is no code for the paper's attention-based cache ("as in Transformer-XL"), so both readings stand here:
`attention`, a cache whose slots attend the tokens, and `store`, the tokens of the last step as they are
(`memories/attention_cache.py`). All but `released` are without the released code's convolution, and comparable to
`paper`.
"""

from __future__ import annotations

from collections.abc import Sequence

from .base import Row
from .images import PAPER, SMALL, Backbone, image_table


def backbone_rows(backbone: Backbone) -> list[Row]:
    """Plain, both attention-based caches, both forms of GRC, and the controls."""
    name = backbone.name
    against = (name, f"{name}-attention", f"{name}-store")
    return [
        backbone.plain(),
        *(
            backbone.row(update, {"name": "attention_cache", "update": update}, against=(name,))
            for update in ("attention", "store")
        ),
        backbone.row("paper", {"variant": "algorithm1"}, against=against),
        backbone.released(),
        backbone.convolution(),
        backbone.wider(),
    ]


def _rows(scale: str) -> Sequence[Row]:
    return backbone_rows(PAPER["vit_small"] if scale == "paper" else SMALL["vit"])


TABLE2 = image_table(
    "images: no cache, an attention-based cache (as in Transformer-XL), and GRC, in a vision transformer",
    _rows,
    recipes={"small": "table2_small", "paper": "imagenet_vit_small_grc"},
)
