"""Objectives by name: which noise a text gets, and what a model is to say of it.

    name                    source                                  target
    bart                    begin, noise of several kinds, end      the text, end
    text_infilling, token_masking, token_deletion, sentence_permutation, document_rotation: one kind alone
    span_corruption         text with sentinels, end                sentinels, each with its span, end
    prefix_lm               the beginning of the text, end          the rest, end

The decoder reads `begin` and then its target, one place later. The published models differ in names alone: T5 begins
with its padding, BART with its end, and then has its decoder say the begin token, which always comes first.
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
    """Makes source and target of a text."""

    def text_length(self, max_length: int) -> int:
        """Tokens of a text of which neither source nor target is longer than `max_length`."""
        ...

    def sentinels(self, length: int) -> int:
        """Sentinels that a text of so many tokens needs."""
        ...

    def __call__(self, tokens_N: Ids, special: SpecialTokens, generator: Generator) -> tuple[Ids, Ids]:
        """Source and target, the latter with its end, of a text of two tokens or more."""
        ...


def create_objective(spec: ObjectiveSpec) -> Objective:
    """The objective of a name, or of a mapping with a name and options.

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

    The kinds act in this order: permutation, deletion, masking, infilling, rotation.

    Args:
        infilling: share of tokens (or words) under masks for spans. mean: of the spans' lengths (Poisson).
        replace: what comes for a span: one mask ("span"), one for each token ("token"), or "nothing".
        random_rate: share of the masks that are random tokens instead; 0.1 is in use with fairseq.
        whole_words: spans begin and end with words, for byte pairs and bytes.
        masking: share of tokens under masks. deletion: share that goes.
        permutation: share of the sentences that change places. rotation: chance that the text begins elsewhere.

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
            try:
                denoising.part_of(getattr(self, name), 1)
            except ValueError:
                raise ValueError(f"objective {name}={getattr(self, name)} must lie in [0, 1]: it is a rate") from None
        denoising.span_lengths(1, self.mean, np.random.default_rng(0))
        if self.replace not in ("span", "token", "nothing"):
            raise ValueError(f"objective replace={self.replace!r} must be 'span', 'token' or 'nothing'")

    def text_length(self, max_length: int) -> int:
        return max_length - 2

    def sentinels(self, length: int) -> int:
        return 0

    def __call__(self, tokens_N: Ids, special: SpecialTokens, generator: Generator) -> tuple[Ids, Ids]:
        text_N, size = tokens_N, special.text.vocabulary
        random: dict[str, Any] = {"random_rate": self.random_rate, "vocabulary": size}
        if self.permutation:
            text_N = denoising.permute_sentences(text_N, special.sentence_ends, generator, rate=self.permutation)
        if self.deletion:
            text_N = denoising.delete_tokens(text_N, self.deletion, generator)
        if self.masking:
            text_N = denoising.mask_tokens(text_N, self.masking, special.mask, generator, **random)
        if self.infilling:
            text_N = denoising.infill_text(
                text_N,
                self.infilling,
                special.mask,
                generator,
                mean=self.mean,
                replace=self.replace,
                starts_N=_starts(special)[text_N] if self.whole_words else None,
                longest=len(tokens_N),
                **random,
            )
        text_N = denoising.rotate_document(text_N, generator, rate=self.rotation)
        source = np.concatenate([[special.begin], text_N, [special.end]])
        return source, np.append(tokens_N, special.end)


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
        rate: share of tokens (or words) under masks. mean, replace, random_rate, whole_words: see `Bart`.
    """
    return Bart(rate, mean, replace, random_rate, whole_words, permutation=0.0)


@OBJECTIVES.register("token_masking", paper="arXiv:1910.13461")
def token_masking(rate: float = 0.15, random_rate: float = 0.0) -> Bart:
    """Single tokens under masks; see `mask_tokens`.

    Args:
        rate: share of tokens under masks. random_rate: see `Bart`.
    """
    return Bart(masking=rate, random_rate=random_rate, infilling=0.0, permutation=0.0)


@OBJECTIVES.register("token_deletion", paper="arXiv:1910.13461")
def token_deletion(rate: float = 0.15) -> Bart:
    """Single tokens deleted; see `delete_tokens`.

    Args:
        rate: share of tokens that goes.
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
    """The text from another token on; see `rotate_document`.

    Args:
        rate: chance that a text begins elsewhere.
    """
    return Bart(rotation=rate, infilling=0.0, permutation=0.0)


@OBJECTIVES.register("span_corruption", paper="arXiv:1910.10683")
@dataclass(frozen=True)
class SpanCorruption:
    """T5's noise: spans of the text are replaced by sentinels, behind which the target names them; see `corrupt_spans`.

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
@dataclass(frozen=True)
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
    """Which ids begin a word; a mask, which stands for words, does."""
    starts = np.ones(special.vocabulary, dtype=bool)
    starts[: special.text.vocabulary] = special.word_starts()
    return starts
