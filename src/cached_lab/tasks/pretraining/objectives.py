"""Objectives by name: source and target of a text.

    name                    source                                  target
    bart                    begin, noise of several kinds, end      the text, end
    span_corruption         text with sentinels, end                sentinels, each with its span, end
    prefix_lm               the beginning of the text, end          the rest, end

The decoder reads `begin` and then its target, one place later. The published models differ only in names: T5 begins
with its padding token; BART begins with its end token, and its decoder then predicts the begin token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from cached_lab.data.tokenizers import SpecialTokens
from cached_lab.registries import OBJECTIVES
from cached_transformers.checks import shares

from . import denoising
from .denoising import Generator, Ids

ObjectiveSpec = str | Mapping[str, Any]
"""A name, or {"name": ..., option: value}."""


def create_objective(spec: ObjectiveSpec) -> Any:
    """Return the objective of a name, or of a mapping with a name and options.

    Its `block(max_length)` is the greatest length of a text whose source and target fit, and its number of sentinels;
    `(tokens_N, special, generator)` gives source and target, the latter with its end, of two tokens or more.

    Raises:
        ValueError: unknown names or options, or values out of range.
    """
    options = {"name": spec} if isinstance(spec, str) else dict(spec)
    if "name" not in options:
        raise ValueError(f"data.objective={spec} must have a name, e.g. {{name: span_corruption, rate: 0.15}}")
    name = options.pop("name")
    OBJECTIVES.check(name, options, "data.objective")
    return OBJECTIVES.create(name, **options)


@OBJECTIVES.register("bart", paper="arXiv:1910.13461")
@dataclass(frozen=True)
class Bart:
    """BART's noise: by default 30 % of the text infilled, and all sentences permuted, as BART was trained.

    Order of the kinds: permutation, deletion, masking, infilling, rotation.

    Args:
        infilling: share of tokens (or words) in spans under a mask each. mean: of the spans' lengths (Poisson).
        whole_words: spans begin and end with words, for byte pairs and bytes.
        masking: share of masked tokens. deletion: share of removed tokens.
        permutation: share of the sentences that change places. rotation: probability of another first token.

    Raises:
        ValueError: a share outside of [0, 1], or a mean outside of 0.001 .. a million.
    """

    infilling: float = 0.3
    mean: float = 3.0
    whole_words: bool = False
    masking: float = 0.0
    deletion: float = 0.0
    permutation: float = 1.0
    rotation: float = 0.0

    def __post_init__(self) -> None:
        rates = ("infilling", "masking", "deletion", "permutation", "rotation")
        shares(**{name: getattr(self, name) for name in rates})
        if not 1e-3 <= self.mean <= 1e6:
            raise ValueError(f"mean={self.mean} must lie in 0.001..1,000,000: spans of no tokens cover none")

    def block(self, max_length: int) -> tuple[int, int]:
        return max_length - 2, 0

    def __call__(self, tokens_N: Ids, special: SpecialTokens, generator: Generator) -> tuple[Ids, Ids]:
        text_N = tokens_N
        if self.permutation:
            text_N = denoising.permute_sentences(text_N, special.sentence_ends, generator, rate=self.permutation)
        if self.deletion:
            text_N = denoising.delete_tokens(text_N, self.deletion, generator)
        if self.masking:
            text_N = denoising.mask_tokens(text_N, self.masking, special.mask, generator)
        if self.infilling:
            starts_N = _starts(special)[text_N] if self.whole_words else None
            spans: dict[str, Any] = {"mean": self.mean, "starts_N": starts_N, "longest": len(tokens_N)}
            text_N = denoising.infill_text(text_N, self.infilling, special.mask, generator, **spans)
        text_N = denoising.rotate_document(text_N, generator, rate=self.rotation)
        return np.concatenate([[special.begin], text_N, [special.end]]), np.append(tokens_N, special.end)


@OBJECTIVES.register("span_corruption", paper="arXiv:1910.10683")
@dataclass(frozen=True)
class SpanCorruption:
    """T5's noise: sentinels replace spans of the text, and precede them in the target; see `corrupt_spans`.

    Args:
        rate: share of tokens in spans. mean: their mean length.

    Raises:
        ValueError: a rate outside of (0, 1), or a mean below 1.
    """

    rate: float = 0.15
    mean: float = 3.0

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise ValueError(f"rate={self.rate} must lie between 0 and 1; T5 takes 0.15")
        if not self.mean >= 1:
            raise ValueError(f"mean={self.mean} must be at least 1 token; T5 takes 3")

    def block(self, max_length: int) -> tuple[int, int]:
        length = denoising.raw_length(max_length, self.rate, self.mean)
        return length, denoising.noise_counts(length, self.rate, self.mean)[1]

    def __call__(self, tokens_N: Ids, special: SpecialTokens, generator: Generator) -> tuple[Ids, Ids]:
        spans = {"rate": self.rate, "mean": self.mean}
        return denoising.corrupt_spans(tokens_N, special.sentinels, special.end, generator, **spans)


@OBJECTIVES.register("prefix_lm", paper="arXiv:1910.10683")
class PrefixLanguageModelling:
    """The rest of a text after a beginning of random length."""

    def block(self, max_length: int) -> tuple[int, int]:
        return max_length, 0

    def __call__(self, tokens_N: Ids, special: SpecialTokens, generator: Generator) -> tuple[Ids, Ids]:
        place = int(generator.integers(1, len(tokens_N)))
        return np.append(tokens_N[:place], special.end), np.append(tokens_N[place:], special.end)


@lru_cache(maxsize=4)
def _starts(special: SpecialTokens) -> np.ndarray:
    """Mark the ids that begin a word; a mask, which replaces words, does."""
    starts = np.ones(special.vocabulary, dtype=bool)
    starts[: special.text.vocabulary] = special.word_starts()
    return starts
