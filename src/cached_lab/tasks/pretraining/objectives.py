"""Objectives by name: source and target of a text.

    name                    source                                  target
    bart                    begin, noise of several kinds, end      the text, end
    text_infilling, token_masking, token_deletion, sentence_permutation, document_rotation: one kind only
    span_corruption         text with sentinels, end                sentinels, each with its span, end
    prefix_lm               the beginning of the text, end          the rest, end

The decoder reads `begin` and then its target, one place later. The published models differ only in names: T5 begins
with its padding token; BART begins with its end token, and its decoder then predicts the begin token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from cached_lab.data.tokenizers import SpecialTokens
from cached_lab.registries import OBJECTIVES

from . import denoising
from .denoising import Generator, Ids, Replacement

ObjectiveSpec = str | Mapping[str, Any]
"""A name, or {"name": ..., option: value}."""


class Objective(Protocol):
    """Maker of a source and a target from a text."""

    def text_length(self, max_length: int) -> int:
        """Return the greatest length of a text whose source and target have at most `max_length` tokens."""
        ...

    def sentinels(self, length: int) -> int:
        """Return the number of sentinels for a text of this length."""
        ...

    def __call__(self, tokens_N: Ids, special: SpecialTokens, generator: Generator) -> tuple[Ids, Ids]:
        """Return source and target, the latter with its end, of a text of at least two tokens."""
        ...


def create_objective(spec: ObjectiveSpec) -> Objective:
    """Return the objective of a name, or of a mapping with a name and options.

    Raises:
        ValueError: unknown names or options, or values out of range.
    """
    if isinstance(spec, str):
        return OBJECTIVES.create(spec)
    options = dict(spec)
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
        infilling: share of tokens (or words) in masked spans. mean: of the spans' lengths (Poisson).
        replace: replacement of a span: one mask ("span"), one per token ("token"), or "nothing".
        random_rate: share of the masks replaced by random tokens; 0.1 is in use with fairseq.
        whole_words: spans begin and end with words, for byte pairs and bytes.
        masking: share of masked tokens. deletion: share of removed tokens.
        permutation: share of the sentences that change places. rotation: probability of another first token.

    Raises:
        ValueError: a share outside of [0, 1], a mean outside of 0.001 .. a million, an unknown replacement.
    """

    infilling: float = 0.3
    mean: float = 3.0
    replace: Replacement = "span"
    random_rate: float = 0.0
    whole_words: bool = False
    masking: float = 0.0
    deletion: float = 0.0
    permutation: float = 1.0
    rotation: float = 0.0

    def __post_init__(self) -> None:
        for name in ("infilling", "random_rate", "masking", "deletion", "permutation", "rotation"):
            if not 0 <= (rate := getattr(self, name)) <= 1:
                raise ValueError(f"objective {name}={rate} must lie in [0, 1]: it is a rate")
        denoising.span_lengths(1, self.mean, np.random.default_rng(0))
        denoising.check_replacement(self.replace)

    def text_length(self, max_length: int) -> int:
        return max_length - 2

    def sentinels(self, length: int) -> int:
        return 0

    def __call__(self, tokens_N: Ids, special: SpecialTokens, generator: Generator) -> tuple[Ids, Ids]:
        text_N = tokens_N
        random: dict[str, Any] = {"random_rate": self.random_rate, "vocabulary": special.text.vocabulary}
        if self.permutation:
            text_N = denoising.permute_sentences(text_N, special.sentence_ends, generator, rate=self.permutation)
        if self.deletion:
            text_N = denoising.delete_tokens(text_N, self.deletion, generator)
        if self.masking:
            text_N = denoising.mask_tokens(text_N, self.masking, special.mask, generator, **random)
        if self.infilling:
            starts_N = _starts(special)[text_N] if self.whole_words else None
            spans: dict[str, Any] = {
                "mean": self.mean,
                "replace": self.replace,
                "starts_N": starts_N,
                "longest": len(tokens_N),
            }
            text_N = denoising.infill_text(text_N, self.infilling, special.mask, generator, **spans, **random)
        text_N = denoising.rotate_document(text_N, generator, rate=self.rotation)
        return np.concatenate([[special.begin], text_N, [special.end]]), np.append(tokens_N, special.end)


@OBJECTIVES.register("text_infilling", paper="arXiv:1910.13461")
def text_infilling(
    rate: float = 0.3,
    mean: float = 3.0,
    replace: Replacement = "span",
    random_rate: float = 0.0,
    whole_words: bool = False,
) -> Bart:
    """Spans of text under one mask each; see `infill_text`.

    Args:
        rate: share of tokens (or words) in masked spans. mean, replace, random_rate, whole_words: see `Bart`.
    """
    return Bart(rate, mean, replace, random_rate, whole_words, permutation=0.0)


@OBJECTIVES.register("token_masking", paper="arXiv:1910.13461")
def token_masking(rate: float = 0.15, random_rate: float = 0.0) -> Bart:
    """Single tokens under masks; see `mask_tokens`.

    Args:
        rate: share of masked tokens. random_rate: see `Bart`.
    """
    return Bart(masking=rate, random_rate=random_rate, infilling=0.0, permutation=0.0)


@OBJECTIVES.register("token_deletion", paper="arXiv:1910.13461")
def token_deletion(rate: float = 0.15) -> Bart:
    """Single tokens deleted; see `delete_tokens`.

    Args:
        rate: share of removed tokens.
    """
    return Bart(deletion=rate, infilling=0.0, permutation=0.0)


@OBJECTIVES.register("sentence_permutation", paper="arXiv:1910.13461")
def sentence_permutation(rate: float = 1.0) -> Bart:
    """Sentences in another order; see `permute_sentences`.

    Args:
        rate: share of the sentences that change places.
    """
    return Bart(permutation=rate, infilling=0.0)


@OBJECTIVES.register("document_rotation", paper="arXiv:1910.13461")
def document_rotation(rate: float = 1.0) -> Bart:
    """The text rotated to another first token; see `rotate_document`.

    Args:
        rate: probability of a rotation.
    """
    return Bart(rotation=rate, infilling=0.0, permutation=0.0)


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
        denoising.noise_counts(2, self.rate, self.mean)

    def text_length(self, max_length: int) -> int:
        length = denoising.raw_length(max_length, self.rate, self.mean)
        while max(denoising.corrupted_lengths(length, self.rate, self.mean)) > max_length:
            length -= 1
        return length

    def sentinels(self, length: int) -> int:
        return denoising.noise_counts(length, self.rate, self.mean)[1]

    def __call__(self, tokens_N: Ids, special: SpecialTokens, generator: Generator) -> tuple[Ids, Ids]:
        spans = {"rate": self.rate, "mean": self.mean}
        return denoising.corrupt_spans(tokens_N, special.sentinels, special.end, generator, **spans)


@OBJECTIVES.register("prefix_lm", paper="arXiv:1910.10683")
class PrefixLanguageModelling:
    """The rest of a text after a beginning of random length; see `split_prefix`."""

    def text_length(self, max_length: int) -> int:
        return max_length

    def sentinels(self, length: int) -> int:
        return 0

    def __call__(self, tokens_N: Ids, special: SpecialTokens, generator: Generator) -> tuple[Ids, Ids]:
        source, target = denoising.split_prefix(tokens_N, generator)
        return np.append(source, special.end), np.append(target, special.end)


@lru_cache(maxsize=4)
def _starts(special: SpecialTokens) -> np.ndarray:
    """Mark the ids that begin a word; a mask, which replaces words, does."""
    starts = np.ones(special.vocabulary, dtype=bool)
    starts[: special.text.vocabulary] = special.word_starts()
    return starts
