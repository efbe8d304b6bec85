"""Noise on token ids: exact rates, order, inverses, limiting cases and distributions.

Texts are 0, 1, 2, .., so that each token is its own place.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from data.restored_spans import restore_spans
from hypothesis import given, settings
from hypothesis import strategies as st

from cached_lab.tasks.pretraining import denoising as dn

MASK, END = -1, -2
SENTINELS = tuple(range(-100, -400, -1))

sizes = st.integers(0, 60)
seeds = st.integers(0, 2**32 - 1)
hundredths = st.integers(0, 100)


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def share(hundredth: int, size: int) -> int:
    return math.ceil(Fraction(hundredth, 100) * size)


def test_rates_and_lengths_are_those_that_are_written() -> None:
    assert [dn.part_of(0.1, 30), dn.part_of(0.07, 100), dn.part_of(0.3, 10), dn.part_of(0.3, 11)] == [3, 7, 3, 4]
    assert math.ceil(0.07 * 100) == 8  # what this is about
    for inputs, raw, targets in ((512, 568, 114), (1024, 1137, 229), (128, 141, 29)):
        assert dn.raw_length(inputs) == raw
        assert dn.corrupted_lengths(raw, 0.15, 3.0) == (inputs, targets)
        assert dn.corrupted_lengths(raw + 1, 0.15, 3.0)[0] > inputs
    length = dn.raw_length(64, 0.8, 8.0)  # most of the text is noise, so that the targets decide
    assert max(dn.corrupted_lengths(length, 0.8, 8.0)) <= 64 < max(dn.corrupted_lengths(length + 1, 0.8, 8.0))


@settings(max_examples=100, deadline=None)
@given(sizes, hundredths, seeds)
def test_masking_covers_exactly_the_rate_and_moves_nothing(size: int, rate: int, seed: int) -> None:
    tokens = np.arange(size)
    noised = dn.mask_tokens(tokens, rate / 100, MASK, generator(seed))
    masked = noised == MASK
    assert masked.sum() == share(rate, size) and len(noised) == size
    assert (noised[~masked] == tokens[~masked]).all()


@settings(max_examples=100, deadline=None)
@given(sizes, hundredths, seeds)
def test_deletion_takes_exactly_the_rate_and_keeps_the_order(size: int, rate: int, seed: int) -> None:
    noised = dn.delete_tokens(np.arange(size), rate / 100, generator(seed))
    assert len(noised) == size - share(rate, size) and (np.diff(noised) > 0).all()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 300), st.floats(0.05, 20), seeds)
def test_span_lengths_meet_the_budget_exactly(budget: int, mean: float, seed: int) -> None:
    lengths = dn.span_lengths(budget, mean, generator(seed))
    assert lengths.sum() == budget and (lengths >= 0).all()
    assert not budget or lengths[-1] > 0  # it ends as soon as the budget is met


def test_span_lengths_are_poisson_or_ever_shorter() -> None:
    lengths = dn.span_lengths(100_000, 3.0, generator())[:-1]
    for length in range(7):
        expected = math.exp(-3) * 3**length / math.factorial(length)
        assert np.mean(lengths == length) == pytest.approx(expected, abs=4 * math.sqrt(expected / len(lengths)))
    noised = dn.infill_text(np.arange(20), 0.25, MASK, generator(), mean=1e-3)
    assert (noised != MASK).sum() == 15 and (noised == MASK).sum() > 500
    bounded = dn.infill_text(np.arange(20), 0.25, MASK, generator(), mean=1e-3, longest=20)
    assert (bounded != MASK).sum() == 15 and len(bounded) == 20  # 5 spans of one word, and no place for insertions


@settings(max_examples=200, deadline=None)
@given(sizes, hundredths, st.floats(0.2, 6), seeds)
def test_infilling_covers_exactly_the_rate_and_keeps_the_order(size: int, rate: int, mean: float, seed: int) -> None:
    noised = dn.infill_text(np.arange(size), rate / 100, MASK, generator(seed), mean=mean)
    kept, masks = noised[noised != MASK], int((noised == MASK).sum())
    assert len(kept) == size - share(rate, size) and (np.diff(kept) > 0).all()
    # The same generator draws the same lengths first.
    assert masks == len(dn.span_lengths(share(rate, size), mean, generator(seed)))
    # Between two remaining neighbours that were not adjacent there is at least one mask.
    before, masks = -1, 0
    for token in [*noised.tolist(), size]:
        if token == MASK:
            masks += 1
            continue
        assert masks or token == before + 1
        before, masks = token, 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 4), max_size=30), st.integers(0, 3), hundredths, seeds)
def test_infilling_of_whole_words_never_cuts_one(words: list[int], head: int, rate: int, seed: int) -> None:
    """Rates count words, and a word's tokens stay or go together; tokens before the first word stay."""
    starts = np.array([False] * head + [place == 0 for word in words for place in range(word)], dtype=bool)
    owner = [-1] * head + [index for index, word in enumerate(words) for _ in range(word)]
    tokens = np.arange(len(starts))
    noised = dn.infill_text(tokens, rate / 100, MASK, generator(seed), starts_N=starts)
    kept = noised[noised != MASK].tolist()
    assert len({owner[token] for token in kept} - {-1}) == len(words) - share(rate, len(words))
    assert kept == [token for token in tokens if owner[token] in {owner[other] for other in kept}]
    assert kept[:head] == list(range(head))


def test_spans_rotations_and_partitions_have_equal_chances() -> None:
    """One span of all the budget in 6 words: budget 2 of spans much longer on average is a single span, at 5 places."""
    found = Counter(tuple(dn.infill_text(np.arange(6), 0.3, MASK, generator(s), mean=50).tolist()) for s in range(4000))
    assert len(found) == 5
    assert all(count == pytest.approx(800, abs=4 * math.sqrt(640)) for count in found.values())
    found = Counter(int(dn.rotate_document(np.arange(5), generator(seed))[0]) for seed in range(4000))
    assert len(found) == 5 and all(count == pytest.approx(800, abs=4 * math.sqrt(640)) for count in found.values())
    found = Counter(tuple(dn.partition(5, 3, generator(seed)).tolist()) for seed in range(6000))
    assert set(found) == {p for p in itertools.product(range(1, 4), repeat=3) if sum(p) == 5}
    assert all(count == pytest.approx(1000, abs=4 * math.sqrt(840)) for count in found.values())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=40), hundredths, seeds)
def test_permutation_is_a_bijection_on_sentences(tokens: list[int], rate: int, seed: int) -> None:
    """0 and 1 end sentences; the same sentences come out, and so do the same tokens."""
    ends = {0, 1}
    text = np.array(tokens, dtype=np.int64)
    bounds = dn.sentence_bounds(text, ends)
    assert [place for start, end in bounds for place in range(start, end)] == list(range(len(text)))
    for start, end in bounds:
        stops = [token in ends for token in tokens[start:end]]
        assert stops == sorted(stops) and (stops[-1] or end == len(text))
    noised = dn.permute_sentences(text, ends, generator(seed), rate=rate / 100)
    sentences = [tuple(tokens[start:end]) for start, end in bounds]
    left = noised.tolist()
    moved = Counter(sentences)
    order = [list(p) for p in itertools.permutations(sentences)] if len(sentences) <= 5 else None
    assert order is None or left in [[t for s in p for t in s] for p in order]
    assert Counter(left) == Counter(tokens) and sum(moved.values()) == len(bounds)


def test_permutation_moves_as_many_sentences_as_the_rate_allows_in_any_order() -> None:
    text = np.array([5, 0, 6, 0, 7, 0])
    found = Counter(tuple(dn.permute_sentences(text, {0}, generator(seed)).tolist()) for seed in range(3000))
    assert len(found) == 6 and all(count == pytest.approx(500, abs=4 * math.sqrt(420)) for count in found.values())
    half = Counter(tuple(dn.permute_sentences(text, {0}, generator(seed), rate=0.34).tolist()) for seed in range(3000))
    assert len(half) == 4  # two of three may change places: three exchanges, and none
    assert tuple(text) in half


@settings(max_examples=100, deadline=None)
@given(sizes, seeds)
def test_rotation_is_undone_by_turning_back_to_the_first_token(size: int, seed: int) -> None:
    noised = dn.rotate_document(np.arange(size), generator(seed))
    first = int(np.flatnonzero(noised == 0)[0]) if size else 0
    assert np.roll(noised, -first).tolist() == list(range(size))


@settings(max_examples=30, deadline=None)
@given(sizes, seeds)
def test_no_noise_is_the_text(size: int, seed: int) -> None:
    tokens = np.arange(size)
    g = generator(seed)
    for noised in (
        dn.mask_tokens(tokens, 0.0, MASK, g),
        dn.delete_tokens(tokens, 0.0, g),
        dn.infill_text(tokens, 0.0, MASK, g),
        dn.permute_sentences(tokens, {3}, g, rate=0.0),
        dn.rotate_document(tokens, g, rate=0.0),
    ):
        assert noised.tolist() == tokens.tolist() and noised.dtype == np.int64


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 200), st.integers(1, 99), st.floats(1, 10), seeds)
def test_spans_are_restored_and_counted_exactly(size: int, rate: int, mean: float, seed: int) -> None:
    tokens = np.arange(size)
    inputs, targets = dn.corrupt_spans(tokens, SENTINELS, END, generator(seed), rate=rate / 100, mean=mean)
    assert restore_spans(inputs, targets, SENTINELS, END).tolist() == tokens.tolist()
    noise, spans = dn.noise_counts(size, rate / 100, mean)
    assert noise == min(max(round(size * (rate / 100)), 1), size - 1)  # of 0.35, which is less than 35 / 100
    assert (len(inputs), len(targets)) == dn.corrupted_lengths(size, rate / 100, mean)
    used = [token for token in inputs.tolist() if token in SENTINELS]
    assert used == list(SENTINELS[:spans]) == [token for token in targets.tolist() if token in SENTINELS]
    assert inputs[-1] == targets[-1] == END
    assert inputs[0] == 0 and targets[0] == SENTINELS[0]  # what stays comes first
    assert (targets >= 0).sum() == noise and (inputs >= 0).sum() == size - noise
    # No span is empty, on either side.
    for side in (inputs.tolist(), targets.tolist()):
        assert all(not (a < 0 and b < 0) for a, b in itertools.pairwise(side[:-1]))


def test_the_generator_alone_decides() -> None:
    tokens = np.arange(100)
    for noise in (
        lambda g: dn.infill_text(tokens, 0.3, MASK, g),
        lambda g: dn.corrupt_spans(tokens, SENTINELS, END, g)[0],
        lambda g: dn.permute_sentences(tokens, set(range(0, 100, 7)), g),
    ):
        assert noise(generator(1)).tolist() == noise(generator(1)).tolist()
        assert noise(generator(1)).tolist() != noise(generator(2)).tolist()
