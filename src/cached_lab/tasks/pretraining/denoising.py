"""Noise on token ids: BART's five transformations, T5's span corruption and prefix language modelling.

Pure functions of an array and a numpy Generator; every rate is met exactly. BART: Lewis et al. 2020 (arXiv:1910.13461,
section 2.2; fairseq/data/denoising_dataset.py). T5: Raffel et al. 2020 (arXiv:1910.10683, section 3.1.4; t5/data/
preprocessors.py of google-research/text-to-text-transfer-transformer).

Text infilling covers exactly ceil(rate * words) words by disjoint spans. In fairseq the starts of spans are independent
of their lengths, so spans overlap and cover fewer words.

Legend: N tokens, W words, S spans.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Generator = np.random.Generator
Replacement = Literal["span", "token", "nothing"]


def part_of(rate: float, size: int) -> int:
    """Return ceil(rate * size) for the decimal rate: 0.1 of 30 is 3, though 0.1 * 30 > 3 in binary.

    Raises:
        ValueError: a rate outside of [0, 1].
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"rate={rate} must lie in [0, 1]; it is the share that noise covers, e.g. 0.3")
    return math.ceil(Fraction(str(float(rate))) * size)


def mask_tokens(
    tokens_N: Any, rate: float, mask: int, generator: Generator, *, random_rate: float = 0.0, vocabulary: int = 0
) -> Ids:
    """Token masking: replace ceil(rate * N) tokens, sampled without replacement, by `mask`.

    Args:
        random_rate: probability of a random id below `vocabulary` instead of each mask.
    """
    tokens_N = _ids(tokens_N)
    chosen = generator.choice(len(tokens_N), part_of(rate, len(tokens_N)), replace=False)
    result_N = tokens_N.copy()
    result_N[chosen] = _fillers(len(chosen), mask, random_rate, vocabulary, generator)
    return result_N


def delete_tokens(tokens_N: Any, rate: float, generator: Generator) -> Ids:
    """Token deletion: remove ceil(rate * N) tokens, sampled without replacement, without a trace."""
    tokens_N = _ids(tokens_N)
    return np.delete(tokens_N, generator.choice(len(tokens_N), part_of(rate, len(tokens_N)), replace=False))


def span_lengths(budget: int, mean: float, generator: Generator) -> Ids:
    """Sample lengths l_1, l_2, .. ~ Poisson(mean) until their sum reaches the budget; the last one is shortened to it.

    Lengths may be 0: spans that cover nothing.

    Raises:
        ValueError: a mean below a thousandth of a token, or above a million tokens.
    """
    if not 1e-3 <= mean <= 1e6:
        raise ValueError(f"mean={mean} must lie in 0.001..1,000,000: spans of no tokens cover none; BART takes 3")
    lengths: list[int] = []
    left = budget
    while left > 0:
        lengths.append(min(int(generator.poisson(mean)), left))
        left -= lengths[-1]
    return np.array(lengths, dtype=np.int64)


def infill_text(
    tokens_N: Any,
    rate: float,
    mask: int,
    generator: Generator,
    *,
    mean: float = 3.0,
    replace: Replacement = "span",
    random_rate: float = 0.0,
    vocabulary: int = 0,
    starts_N: NDArray[np.bool_] | None = None,
    longest: int | None = None,
) -> Ids:
    """Text infilling: replace spans of words, with lengths from Poisson(mean), by one mask each.

    The lengths sum to ceil(rate * W) words; see `span_lengths`. Spans, insertions and the remaining words are put in a
    uniformly random order that keeps the order of words, so spans never overlap. A span of length 0 inserts a mask.

    Args:
        replace: replacement of a span: one mask ("span"), a mask per token ("token"), or "nothing".
        random_rate: probability of a random id below `vocabulary` instead of each mask.
        starts_N: word starts; None if every token is a word. Tokens before the first start belong to no word and stay.
        longest: tokens of the result, enforced by leaving out insertions; None for no limit.

    Raises:
        ValueError: a rate or mean out of range, or an unknown replacement.
    """
    check_replacement(replace)
    tokens_N = _ids(tokens_N)
    begins = np.arange(len(tokens_N)) if starts_N is None else np.flatnonzero(starts_N)
    bounds = np.append(begins, len(tokens_N))
    words = len(begins)
    lengths_S = generator.permutation(span_lengths(part_of(rate, words), mean, generator))
    stays = words - int(lengths_S.sum())
    # Each place of the new order holds a span, or else the next word that stays.
    places_S = np.sort(generator.choice(stays + len(lengths_S), len(lengths_S), replace=False))
    gaps_S = np.diff(places_S - np.arange(len(lengths_S)), prepend=0)  # words between a span and the one before
    parts: list[Ids] = [tokens_N[: bounds[0]]]
    insertions: list[int] = []
    taken = 0
    for gap, length in zip(gaps_S.tolist(), lengths_S.tolist(), strict=True):
        parts.append(tokens_N[bounds[taken] : bounds[taken + gap]])
        taken += gap + length
        if not length:
            insertions.append(len(parts))
        if not length or replace == "span":
            count = 1
        else:
            count = int(bounds[taken] - bounds[taken - length]) if replace == "token" else 0
        parts.append(_fillers(count, mask, random_rate, vocabulary, generator))
    parts.append(tokens_N[bounds[taken] :])
    surplus = 0 if longest is None else sum(map(len, parts)) - longest
    if surplus > 0 and insertions:
        for place in generator.permutation(insertions)[:surplus]:
            parts[place] = parts[place][:0]
    return np.concatenate(parts)


def check_replacement(replace: str) -> None:
    """Raise ValueError for an unknown replacement of spans."""
    if replace not in ("span", "token", "nothing"):
        raise ValueError(f"replace={replace!r} must be 'span', 'token' or 'nothing'")


def sentence_bounds(tokens_N: Any, ends: Collection[int]) -> list[tuple[int, int]]:
    """Return (start, end) of each sentence, up to and with a run of end tokens ("...", "?!"), and of the rest."""
    tokens_N = _ids(tokens_N)
    stops_N = np.isin(tokens_N, np.fromiter(ends, dtype=np.int64))
    last_N = stops_N & ~np.append(stops_N[1:], False)
    cuts = [0, *(np.flatnonzero(last_N) + 1).tolist()]
    if cuts[-1] != len(tokens_N):
        cuts.append(len(tokens_N))
    return list(pairwise(cuts))


def permute_sentences(tokens_N: Any, ends: Collection[int], generator: Generator, *, rate: float = 1.0) -> Ids:
    """Sentence permutation: put ceil(rate * sentences) of them into a uniformly random order among their places."""
    tokens_N = _ids(tokens_N)
    bounds = sentence_bounds(tokens_N, ends)
    order = np.arange(len(bounds))
    chosen = generator.choice(len(bounds), part_of(rate, len(bounds)), replace=False)
    order[chosen] = generator.permutation(chosen)
    return np.concatenate([tokens_N[slice(*bounds[index])] for index in order]) if len(bounds) else tokens_N


def rotate_document(tokens_N: Any, generator: Generator, *, rate: float = 1.0) -> Ids:
    """Document rotation: with probability `rate`, start at a uniformly random token and append the beginning."""
    part_of(rate, 1)
    tokens_N = _ids(tokens_N)
    if not len(tokens_N) or generator.random() >= rate:
        return tokens_N
    return np.roll(tokens_N, -int(generator.integers(len(tokens_N))))


def noise_counts(length: int, rate: float, mean: float) -> tuple[int, int]:
    """Return round(rate * length) noise tokens and round(noise / mean) spans of a text.

    Both are at least 1, and at least one other token precedes each span.

    Raises:
        ValueError: a text of less than two tokens, a rate outside of (0, 1), or a mean below 1.
    """
    if not 0 < rate < 1:
        raise ValueError(f"rate={rate} must lie between 0 and 1; T5 takes 0.15")
    if not mean >= 1:
        raise ValueError(f"mean={mean} must be at least 1 token; T5 takes 3")
    if length < 2:
        raise ValueError(f"a text of {length} tokens cannot be corrupted and keep one; take 2 or more")
    noise = min(max(round(length * rate), 1), length - 1)
    return noise, min(max(round(noise / mean), 1), noise, length - noise)


def corrupted_lengths(length: int, rate: float, mean: float) -> tuple[int, int]:
    """Return tokens of the inputs and of the targets of a text, ends included.

    inputs = length - noise + spans + 1,    targets = noise + spans + 1
    """
    noise, spans = noise_counts(length, rate, mean)
    return length - noise + spans + 1, noise + spans + 1


def raw_length(inputs: int, rate: float = 0.15, mean: float = 3.0) -> int:
    """Return the greatest length of a text with at most `inputs` corrupted inputs: 568 for 512 (T5's section 3.1.4).

    Raises:
        ValueError: inputs too short to hold a token, a sentinel and the end.
    """
    if inputs < 3:
        raise ValueError(f"inputs={inputs} must be at least 3: a token, a sentinel and the end")
    length = 2
    while corrupted_lengths(length + 1, rate, mean)[0] <= inputs:
        length += 1
    return length


def partition(size: int, parts: int, generator: Generator) -> Ids:
    """Sample lengths (parts,) of at least 1 with sum `size`, uniformly."""
    cuts = np.sort(generator.choice(size - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [size]]))


def corrupt_spans(
    tokens_N: Any, sentinels: Sequence[int], end: int, generator: Generator, *, rate: float = 0.15, mean: float = 3.0
) -> tuple[Ids, Ids]:
    """T5's span corruption: return (inputs, targets), each followed by `end`.

    Noise and remaining tokens are each divided into S parts at random, which alternate, remaining tokens first.
    Sentinel i replaces span i in the inputs, and precedes it in the targets:

        text     A a B b        inputs  A <0> B <1> end        targets  <0> a <1> b end

    Raises:
        ValueError: see `noise_counts`; or there are fewer sentinels than spans.
    """
    tokens_N = _ids(tokens_N)
    noise, spans = noise_counts(len(tokens_N), rate, mean)
    if spans > len(sentinels):
        raise ValueError(
            f"{len(sentinels)} sentinels do not suffice for {spans} spans (rate={rate} of {len(tokens_N)} tokens, "
            f"mean={mean}); take more sentinels, or shorter texts"
        )
    stay_S, noise_S = partition(len(tokens_N) - noise, spans, generator), partition(noise, spans, generator)
    cuts = np.cumsum(np.stack([stay_S, noise_S], 1).reshape(-1))[:-1]
    pieces = np.split(tokens_N, cuts)
    marks = [np.array([sentinel], dtype=np.int64) for sentinel in sentinels[:spans]]
    last = np.array([end], dtype=np.int64)
    inputs = [part for pair in zip(pieces[::2], marks, strict=True) for part in pair]
    targets = [part for pair in zip(marks, pieces[1::2], strict=True) for part in pair]
    return np.concatenate([*inputs, last]), np.concatenate([*targets, last])


def restore_spans(inputs: Any, targets: Any, sentinels: Sequence[int], end: int) -> Ids:
    """Invert `corrupt_spans`; a model's answer may replace the targets.

    A sentinel of the inputs that the targets lack becomes nothing; tokens after `end` do not count.
    """
    known = set(sentinels)
    spans: dict[int, list[int]] = {}
    current: list[int] = []
    for token in _until(targets, end):
        if token in known:
            current = spans.setdefault(token, [])
        else:
            current.append(token)
    text = [part for token in _until(inputs, end) for part in (spans.get(token, []) if token in known else [token])]
    return np.array(text, dtype=np.int64)


def split_prefix(tokens_N: Any, generator: Generator) -> tuple[Ids, Ids]:
    """Prefix language modelling: split at a uniformly random place into two non-empty parts.

    Raises:
        ValueError: a text of less than two tokens.
    """
    tokens_N = _ids(tokens_N)
    if len(tokens_N) < 2:
        raise ValueError(f"a text of {len(tokens_N)} tokens has no prefix and continuation; take 2 tokens or more")
    place = int(generator.integers(1, len(tokens_N)))
    return tokens_N[:place], tokens_N[place:]


def _ids(tokens: Any) -> Ids:
    found = np.asarray(tokens)
    if found.ndim != 1 or (found.size and not np.issubdtype(found.dtype, np.integer)):
        raise ValueError(f"tokens of shape {found.shape} and dtype {found.dtype} must be token ids in one row")
    return found.astype(np.int64)


def _until(tokens: Any, end: int) -> list[int]:
    """Return the tokens before the first `end`."""
    listed: list[int] = _ids(tokens).tolist()
    return listed[: listed.index(end)] if end in listed else listed


def _fillers(count: int, mask: int, random_rate: float, vocabulary: int, generator: Generator) -> Ids:
    """Return masks, each replaced by a random id with probability `random_rate`."""
    filled = np.full(count, mask, dtype=np.int64)
    if not random_rate:
        return filled
    part_of(random_rate, 1)
    if vocabulary < 1:
        raise ValueError(f"random_rate={random_rate} needs the vocabulary of random ids")
    return np.where(generator.random(count) < random_rate, generator.integers(vocabulary, size=count), filled)
