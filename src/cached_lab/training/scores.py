"""Properties of scores by their names: lower is better, or a share of 1."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

Score = Literal[
    "accuracy", "loss", "perplexity", "bits_per_byte", "word_perplexity", "box_ap", "mask_ap", "bleu", "chrf"
]
"""Scores that can choose the best checkpoint."""


class ScoreKind(NamedTuple):
    """Properties of a score; a share of 1 is shown in per cent."""

    lower_is_better: bool = False
    share: bool = False


KINDS = {
    "accuracy": ScoreKind(share=True),
    "loss": ScoreKind(lower_is_better=True),
    "perplexity": ScoreKind(lower_is_better=True),
    "bits_per_byte": ScoreKind(lower_is_better=True),
    "bits_per_character": ScoreKind(lower_is_better=True),
    "error": ScoreKind(lower_is_better=True),
    "box_ap": ScoreKind(share=True),
    "mask_ap": ScoreKind(share=True),
    "bleu": ScoreKind(),
    "chrf": ScoreKind(),
}


def kind_of(score: str) -> ScoreKind:
    """Return the kind of a score, found in `KINDS` by its name or a part of it (`top5_accuracy`, `box_ap50`).

    Higher is better for unknown scores.
    """
    for name, kind in KINDS.items():
        if score == name or score.endswith(f"_{name}") or score.startswith(name):
            return kind
    return ScoreKind()


def goodness(score: str, value: float) -> float:
    """Return a number that is larger for better scores; NaN is worst."""
    if math.isnan(value):
        return -math.inf
    return -value if kind_of(score).lower_is_better else value
