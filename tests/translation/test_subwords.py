"""Subwords: nothing is unknown, and decoding inverts encoding; batches of as many tokens as asked for."""

from __future__ import annotations

from itertools import islice, pairwise

import numpy as np
import pytest
from common import refuses
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cached_lab.data.subwords import END, SPECIALS, PairTokenizer
from cached_lab.data.tokenizers import load_tokenizer
from cached_lab.tasks.translation.token_batches import TokenOrder
from cached_lab.training.loader import Share

TEXTS = ["ein mann sieht ein haus", "a man sees a house .", "don &apos;t go , man !", "über straße"] * 5
TRAINED = {form: PairTokenizer.train(TEXTS, 300, form) for form in ("raw", "moses")}


@pytest.mark.parametrize("form", TRAINED)
@settings(max_examples=25, deadline=None)
@given(text=st.text())
@example("<pad >")
@example("</s >")
@example("<unk >")
@example("  a  b ")
@example("\u2028x\x00")
@example("\U0001f642")
def test_any_text_comes_back(form: str, text: str) -> None:
    *ids, end = TRAINED[form].encode(text).tolist()
    assert end == END and all(token >= len(SPECIALS) for token in ids)
    assert TRAINED[form].decode([*ids, end, *ids]) == text  # tokens after the end are no text


def test_words_and_moses_tokens_are_kept() -> None:
    first, second = TRAINED["raw"].encode_batch(["man", "a man"])
    assert second[-len(first) :] == first
    raw, moses = (PairTokenizer.train(["don &apos;t"] * 9, 300, form) for form in ("raw", "moses"))
    assert len(moses.encode("&apos;t")) == 2 < len(raw.encode("&apos;t"))  # GPT-2's words part at punctuation


def test_a_saved_tokenizer_comes_back() -> None:
    tokenizer = TRAINED["raw"]
    again = load_tokenizer(tokenizer.dump())
    assert isinstance(again, PairTokenizer) and again.dump() == tokenizer.dump()
    assert again.vocabulary == tokenizer.vocabulary
    assert again.encode("ein mann").tolist() == tokenizer.encode("ein mann").tolist()
    refuses(r"vocabulary_size=259.*260", PairTokenizer.train, TEXTS, 259, "raw")


LENGTHS = np.random.default_rng(0).integers(1, 30, (137, 2))


def taken(order: TokenOrder, epoch: int = 0) -> list[list[int]]:
    return [[row for _, row in order.rows(epoch * order.batches + step)] for step in range(order.batches)]


@pytest.mark.parametrize("tokens", [29, 64, 300, 10_000])
def test_each_pair_once_an_epoch_and_no_batch_beyond_its_tokens(tokens: int) -> None:
    order = TokenOrder(LENGTHS, tokens, seed=3)
    for epoch in range(3):
        batches = taken(order, epoch)
        assert sorted(row for batch in batches for row in batch) == list(range(len(LENGTHS)))
        assert all(len(batch) * LENGTHS[batch].max() <= tokens for batch in batches)
        assert {e for step in range(order.batches) for e, _ in order.rows(epoch * order.batches + step)} == {epoch}


def test_no_batch_could_take_another_pair_and_large_ones_are_refused() -> None:
    order = TokenOrder(LENGTHS, 100, seed=3)
    batches = sorted(taken(order), key=lambda batch: LENGTHS[batch].max(1).min())
    for batch, following in pairwise(batches):
        assert (len(batch) + 1) * max(LENGTHS[batch].max(), LENGTHS[following].max(1).min()) > 100
    refuses(r"batch_tokens=28.*29", TokenOrder, LENGTHS, 28, seed=0)


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    first, same, other = (TokenOrder(LENGTHS, 100, seed) for seed in (5, 5, 6))
    assert taken(first, 1) == taken(same, 1) != taken(first, 0)
    assert taken(first, 1) != taken(other, 1)
    # Epochs change the order and the neighbours of a row.
    assert {frozenset(batch) for batch in taken(first, 0)} != {frozenset(batch) for batch in taken(first, 1)}
    steps = first.batches + 3
    late = TokenOrder(LENGTHS, 100, 5, start=steps)
    assert list(islice(late, 4)) == list(islice(islice(first, steps, None), 4))


@pytest.mark.parametrize(("world", "accumulate"), [(1, 3), (2, 1), (3, 2)])
def test_pieces_divide_a_step(world: int, accumulate: int) -> None:
    whole = TokenOrder(LENGTHS, 60, seed=2)
    orders = [TokenOrder(LENGTHS, 60, 2, 0, Share(rank, world, accumulate)) for rank in range(world)]
    streams = [iter(order) for order in orders]
    alone = 0
    for step in range(2 * whole.batches):
        found = []
        for order, stream in zip(orders, streams, strict=True):
            for piece in range(accumulate):
                rows = next(stream)
                assert rows
                if order.empty(step, piece):
                    alone += 1
                    assert rows == whole.rows(step)[:1]
                else:
                    found += rows
        assert sorted(found) == sorted(whole.rows(step))
    assert (alone > 0) is (world * accumulate > 2)
