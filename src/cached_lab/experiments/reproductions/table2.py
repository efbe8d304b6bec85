"""Table 2: a vision transformer without a cache, with an attention-based cache, and with GRC.

There is no code for the paper's attention-based cache ("as in Transformer-XL"), so there are two interpretations:
`attention`, a cache whose slots attend to the tokens, and `store`, the unchanged tokens of the last step
(`memories/attention_cache.py`). All rows but `released` lack the released code's convolution, and compare to `paper`.
"""

from __future__ import annotations

from collections.abc import Sequence

from .base import TableRow
from .images import PAPER, SMALL, Backbone, image_table


def backbone_rows(backbone: Backbone) -> list[TableRow]:
    """Return plain, both attention-based caches, both forms of GRC, and the controls."""
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


def _rows(scale: str) -> Sequence[TableRow]:
    return backbone_rows(PAPER["vit_small"] if scale == "paper" else SMALL["vit"])


TABLE2 = image_table(
    "images: no cache, an attention-based cache (as in Transformer-XL), and GRC, in a vision transformer",
    _rows,
    recipes={"small": "table2_small", "paper": "imagenet_vit_small_grc"},
)
