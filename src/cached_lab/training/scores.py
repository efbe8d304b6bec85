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


_LOWER = ("loss", "perplexity", "bits_per_byte", "bits_per_character", "error")
_SHARES = ("accuracy", "box_ap", "mask_ap")


def kind_of(score: str) -> ScoreKind:
    """Return the kind of a score by its name or a part of it (`top5_accuracy`); higher is better if unknown."""

    def among(names: tuple[str, ...]) -> bool:
        return any(score.startswith(name) or score.endswith(f"_{name}") for name in names)

    return ScoreKind(lower_is_better=among(_LOWER), share=among(_SHARES))


def goodness(score: str, value: float) -> float:
    """Return a number that is larger for better scores; NaN is worst."""
    if math.isnan(value):
        return -math.inf
    return -value if kind_of(score).lower_is_better else value
