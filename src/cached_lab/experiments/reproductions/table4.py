"""Table 4: translation, a Transformer plain, with GRC in the encoder in both forms, and plain at equal operations.

The paper gives single runs of six IWSLT tracks. The paper's scale is IWSLT14 De-En; overrides choose another track, for
example `data.source=es data.target=en`. The small scale is Multi30k En-De ("table4") or a sample of IWSLT14 De-En
("table4_iwslt14"), trained for minutes.

The released code's positional convolution needs images, so its form for text goes without.
"""

from __future__ import annotations

from collections.abc import Sequence

from .base import Reproduction, TableRow
from .images import Backbone, protocol

TRANSFORMER = Backbone("transformer")


def _rows(scale: str) -> Sequence[TableRow]:
    plain, wider = TRANSFORMER.name, f"{TRANSFORMER.name}-wider"
    return [
        TRANSFORMER.row("", None),
        TRANSFORMER.row("paper", {"variant": "algorithm1"}, against=(plain, wider)),
        TRANSFORMER.row("released", {"variant": "released", "positional_convolution": False}, against=(plain, wider)),
        TRANSFORMER.row("wider", None, matched=f"{TRANSFORMER.name}-released"),
    ]


def _table(small: str, files: str) -> Reproduction:
    return Reproduction(
        summary=f"translation: plain, GRC in both forms, and plain at equal operations ({files.split(':')[0]})",
        recipes={"small": small, "paper": "table4_paper"},
        files={"small": files, "paper": "IWSLT14 De-En (train, valid and test in Moses tokens)"},
        paper=_rows,
        protocol=protocol,
    )


TABLE4 = _table("table4_small", "Multi30k En-De: its folder `raw`")
TABLE4_IWSLT14 = _table("table4_small_iwslt14", "a sample of IWSLT14 De-En: train_sample, valid and test")
