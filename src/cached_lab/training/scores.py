"""What a score is by its name: whether less of it is better, and whether it is a share of 1."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

Score = Literal[
    "accuracy", "loss", "perplexity", "bits_per_byte", "word_perplexity", "box_ap", "mask_ap", "bleu", "chrf"
]
"""Scores that can decide which checkpoint is the best."""


class Kind(NamedTuple):
    """What is written under a name: whether less of it is better, and whether it is a share of 1, shown in per cent."""

    lower_is_better: bool = False
    share: bool = False


KINDS = {
    "accuracy": Kind(share=True),
    "loss": Kind(lower_is_better=True),
    "perplexity": Kind(lower_is_better=True),
    "bits_per_byte": Kind(lower_is_better=True),
    "bits_per_character": Kind(lower_is_better=True),
    "error": Kind(lower_is_better=True),
    "box_ap": Kind(share=True),
    "mask_ap": Kind(share=True),
    "bleu": Kind(),
    "chrf": Kind(),
}


def kind_of(score: str) -> Kind:
    """The kind of a score, in `KINDS` by its name, or by a part of it: `top5_accuracy`, `word_perplexity`, `box_ap50`.

    Of what nothing is known more is better.
    """
    for name, kind in KINDS.items():
        if score == name or score.endswith(f"_{name}") or score.startswith(name):
            return kind
    return Kind()


def goodness(score: str, value: float) -> float:
    """A number that is larger where the score is better; one that is not a number is worse than all."""
    if math.isnan(value):
        return -math.inf
    return -value if kind_of(score).lower_is_better else value
