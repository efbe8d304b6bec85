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

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Generator = np.random.Generator


def part_of(rate: float, size: int) -> int:
    """Return ceil(rate * size) for the decimal rate: 0.1 of 30 is 3, though 0.1 * 30 > 3 in binary."""
    return math.ceil(Fraction(str(float(rate))) * size)


def mask_tokens(tokens_N: Ids, rate: float, mask: int, generator: Generator) -> Ids:
    """Token masking: replace ceil(rate * N) tokens, sampled without replacement, by `mask`."""
    result_N = tokens_N.copy()
    result_N[generator.choice(len(tokens_N), part_of(rate, len(tokens_N)), replace=False)] = mask
    return result_N


def delete_tokens(tokens_N: Ids, rate: float, generator: Generator) -> Ids:
    """Token deletion: remove ceil(rate * N) tokens, sampled without replacement, without a trace."""
    return np.delete(tokens_N, generator.choice(len(tokens_N), part_of(rate, len(tokens_N)), replace=False))


def span_lengths(budget: int, mean: float, generator: Generator) -> Ids:
    """Sample lengths l_1, l_2, .. ~ Poisson(mean) until their sum reaches the budget; the last one is shortened to it.

    Lengths may be 0: spans that cover nothing.
    """
    lengths: list[int] = []
    left = budget
    while left > 0:
        lengths.append(min(int(generator.poisson(mean)), left))
        left -= lengths[-1]
    return np.array(lengths, dtype=np.int64)


def infill_text(
    tokens_N: Ids,
    rate: float,
    mask: int,
    generator: Generator,
    *,
    mean: float = 3.0,
    starts_N: NDArray[np.bool_] | None = None,
    longest: int | None = None,
) -> Ids:
    """Text infilling: replace spans of words, with lengths from Poisson(mean), by one mask each.

    The lengths sum to ceil(rate * W) words; see `span_lengths`. Spans, insertions and the remaining words are put in a
    uniformly random order that keeps the order of words, so spans never overlap. A span of length 0 inserts a mask.

    Args:
        starts_N: word starts; None if every token is a word. Tokens before the first start belong to no word and stay.
        longest: tokens of the result, enforced by leaving out insertions; None for no limit.
    """
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
        parts.append(np.array([mask], dtype=np.int64))
    parts.append(tokens_N[bounds[taken] :])
    surplus = 0 if longest is None else sum(map(len, parts)) - longest
    if surplus > 0 and insertions:
        for place in generator.permutation(insertions)[:surplus]:
            parts[place] = parts[place][:0]
    return np.concatenate(parts)


def sentence_bounds(tokens_N: Ids, ends: Collection[int]) -> list[tuple[int, int]]:
    """Return (start, end) of each sentence, up to and with a run of end tokens ("...", "?!"), and of the rest."""
    stops_N = np.isin(tokens_N, np.fromiter(ends, dtype=np.int64))
    last_N = stops_N & ~np.append(stops_N[1:], False)
    cuts = [0, *(np.flatnonzero(last_N) + 1).tolist()]
    if cuts[-1] != len(tokens_N):
        cuts.append(len(tokens_N))
    return list(pairwise(cuts))


def permute_sentences(tokens_N: Ids, ends: Collection[int], generator: Generator, *, rate: float = 1.0) -> Ids:
    """Sentence permutation: put ceil(rate * sentences) of them into a uniformly random order among their places."""
    bounds = sentence_bounds(tokens_N, ends)
    order = np.arange(len(bounds))
    chosen = generator.choice(len(bounds), part_of(rate, len(bounds)), replace=False)
    order[chosen] = generator.permutation(chosen)
    return np.concatenate([tokens_N[slice(*bounds[index])] for index in order]) if len(bounds) else tokens_N


def rotate_document(tokens_N: Ids, generator: Generator, *, rate: float = 1.0) -> Ids:
    """Document rotation: with probability `rate`, start at a uniformly random token and append the beginning."""
    if not len(tokens_N) or generator.random() >= rate:
        return tokens_N
    return np.roll(tokens_N, -int(generator.integers(len(tokens_N))))


def noise_counts(length: int, rate: float, mean: float) -> tuple[int, int]:
    """Return round(rate * length) noise tokens and round(noise / mean) spans of a text of two tokens or more.

    Both are at least 1, and at least one other token precedes each span.
    """
    noise = min(max(round(length * rate), 1), length - 1)
    return noise, min(max(round(noise / mean), 1), noise, length - noise)


def corrupted_lengths(length: int, rate: float, mean: float) -> tuple[int, int]:
    """Return tokens of the inputs and of the targets of a text, ends included.

    inputs = length - noise + spans + 1,    targets = noise + spans + 1
    """
    noise, spans = noise_counts(length, rate, mean)
    return length - noise + spans + 1, noise + spans + 1


def raw_length(most: int, rate: float = 0.15, mean: float = 3.0) -> int:
    """Return the greatest length of a text with at most `most` inputs and targets: 568 for 512 (T5's section 3.1.4)."""
    length = 2
    while corrupted_lengths(length + 1, rate, mean)[0] <= most:
        length += 1
    while max(corrupted_lengths(length, rate, mean)) > most:
        length -= 1
    return length


def partition(size: int, parts: int, generator: Generator) -> Ids:
    """Sample lengths (parts,) of at least 1 with sum `size`, uniformly."""
    cuts = np.sort(generator.choice(size - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [size]]))


def corrupt_spans(
    tokens_N: Ids, sentinels: Sequence[int], end: int, generator: Generator, *, rate: float = 0.15, mean: float = 3.0
) -> tuple[Ids, Ids]:
    """T5's span corruption: return (inputs, targets), each followed by `end`.

    Noise and remaining tokens are each divided into S parts at random, which alternate, remaining tokens first.
    Sentinel i replaces span i in the inputs, and precedes it in the targets:

        text     A a B b        inputs  A <0> B <1> end        targets  <0> a <1> b end
    """
    noise, spans = noise_counts(len(tokens_N), rate, mean)
    stay_S, noise_S = partition(len(tokens_N) - noise, spans, generator), partition(noise, spans, generator)
    cuts = np.cumsum(np.stack([stay_S, noise_S], 1).reshape(-1))[:-1]
    pieces = np.split(tokens_N, cuts)
    marks = [np.array([sentinel], dtype=np.int64) for sentinel in sentinels[:spans]]
    last = np.array([end], dtype=np.int64)
    inputs = [part for pair in zip(pieces[::2], marks, strict=True) for part in pair]
    targets = [part for pair in zip(marks, pieces[1::2], strict=True) for part in pair]
    return np.concatenate([*inputs, last]), np.concatenate([*targets, last])
