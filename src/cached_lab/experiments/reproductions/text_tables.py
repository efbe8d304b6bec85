"""Table 6: Long ListOps of the Long Range Arena, each backbone plain, with GRC, and widened to GRC's FLOPs.

The paper compares a backbone with and without a cache, one seed each, on 2,000 test rows: its gains are 0.6 to 1.4
points, with a standard error of 1.5. Here there are several seeds, a larger generated test set, and for each GRC row a
plain one with a feed-forward of equal training cost. Most published numbers of this task equal the baseline `root
operator`.

The paper's cache is attended to by the backbone's own mechanism; here by exact attention.

Table 4: translation, a Transformer plain, with GRC in the encoder in both forms, and plain at equal operations.

The paper gives single runs of six IWSLT tracks. The paper's scale is IWSLT14 De-En; overrides choose another track, for
example `data.source=es data.target=en`. The small scale is Multi30k En-De ("table4") or a sample of IWSLT14 De-En
("table4_iwslt14"), trained for minutes.

The released code's positional convolution needs images, so its form for text goes without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cached_lab.training.config import RunConfig

from .base import Reproduction, TableRow
from .images import Backbone, grc_options, section_words
from .images import protocol as image_protocol

ATTENTIONS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "small": {
        "transformer": {"name": "softmax"},
        "bigbird": {"name": "bigbird", "block": 4, "random": 1},
        "reformer": {"name": "reformer", "rounds": 1, "buckets": 8, "chunk": 8},
    },
    "paper": {
        "transformer": {"name": "softmax"},
        "bigbird": {"name": "bigbird", "block": 64, "random": 3},
        "reformer": {"name": "reformer", "rounds": 1, "buckets": 10, "chunk": 201},
    },
}
"""The arena's settings for its 2,001 tokens. The 65 tokens of the small scale have as many, but smaller, blocks and
chunks: with the arena's sizes each mechanism would be exact attention."""

PROJECTIONS: Mapping[str, Mapping[str, Any]] = {"reformer": {"shared_query_key": True, "project_output": False}}
"""Model options of an attention: the arena's Reformer projects only queries and values."""


def backbone_rows(name: str, attention: Mapping[str, Any], options: Mapping[str, Any]) -> list[TableRow]:
    """Return a backbone plain, with the recipe's GRC, and plain at the cost of the second."""

    def plain(recipe: RunConfig) -> dict[str, Any]:
        return {**recipe.model, **options, "attention": dict(attention), "memory": None}

    def cached(recipe: RunConfig) -> dict[str, Any]:
        return {**plain(recipe), "memory": grc_options(recipe, rows_do="take it out or leave it")}

    grc, control = f"{name}-grc", f"{name}-control"
    return [
        TableRow(name, plain),
        TableRow(grc, cached, against=(name, control)),
        TableRow(control, plain, matched=grc),
    ]


def _rows(scale: str) -> Sequence[TableRow]:
    return [
        row
        for name, attention in ATTENTIONS[scale].items()
        for row in backbone_rows(name, attention, PROJECTIONS.get(name, {}))
    ]


def protocol(config: RunConfig) -> str:
    """Describe a row in a line: attention, memory, feed-forward."""
    sections = [config.model[kind] for kind in ("attention", "memory") if config.model.get(kind) is not None]
    return f"{' + '.join(map(section_words, sections))}, feed_forward {config.model['feed_forward']}"


TABLE6 = Reproduction(
    summary="Long ListOps: Transformer, BigBird and Reformer, plain, with GRC, and plain at equal operations",
    recipes={"small": "table6_small", "paper": "table6_paper"},
    files={},
    paper=_rows,
    protocol=protocol,
)

TRANSFORMER = Backbone("transformer")


def _translation_rows(scale: str) -> Sequence[TableRow]:
    plain, wider = TRANSFORMER.name, f"{TRANSFORMER.name}-wider"
    return [
        TRANSFORMER.row("", None),
        TRANSFORMER.row("paper", {"variant": "algorithm1"}, against=(plain, wider)),
        TRANSFORMER.row("released", {"variant": "released", "positional_convolution": False}, against=(plain, wider)),
        TRANSFORMER.row("wider", None, matched=f"{TRANSFORMER.name}-released"),
    ]


def _translation(small: str, files: str) -> Reproduction:
    return Reproduction(
        summary=f"translation: plain, GRC in both forms, and plain at equal operations ({files.split(':')[0]})",
        recipes={"small": small, "paper": "table4_paper"},
        files={"small": files, "paper": "IWSLT14 De-En (train, valid and test in Moses tokens)"},
        paper=_translation_rows,
        protocol=image_protocol,
    )


TABLE4 = _translation("table4_small", "Multi30k En-De: its folder `raw`")
TABLE4_IWSLT14 = _translation("table4_small_iwslt14", "a sample of IWSLT14 De-En: train_sample, valid and test")
