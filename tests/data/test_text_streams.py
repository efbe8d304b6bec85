"""Streams: every token once, in order, in its row; ends of rows, documents and epochs; the order of shards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
import torch
from common import refuses
from hypothesis import given, settings
from hypothesis import strategies as st

from cached_lab.tasks.language.shard_order import Dealer, as_tensor, from_tensor
from cached_lab.tasks.language.streams import Streams

START = 7


def corpus(*lengths: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that are all different, from 100 on, and where documents begin."""
    starts = np.cumsum([0, *lengths[:-1]])
    return np.arange(100, 100 + sum(lengths), dtype=np.uint16), starts


def epoch(streams: Streams, number: int = 0) -> list:
    return [streams.batch(number * streams.steps + step) for step in range(streams.steps)]


def rows_of(batches: list, name: str) -> list[list[int]]:
    """The tokens of each row over an epoch, without padding."""
    joined = torch.cat([getattr(batch, name) for batch in batches], 1)
    valid = torch.cat([batch.targets for batch in batches], 1) != -100
    return [row[keep].tolist() for row, keep in zip(joined, valid, strict=True)]


def flat(rows: list[list[int]]) -> list[int]:
    return [token for row in rows for token in row]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(0, 3),
    st.sampled_from([None, 3]),
)
def test_every_token_is_read_once_an_epoch(lengths, rows, align, segments, seed):
    tokens, starts = corpus(*lengths)
    length, align = align * max(segments, 1), align if segments else 0
    try:
        streams = Streams(tokens, starts, START, rows, length, align=align, seed=seed)
    except ValueError:
        assert rows > len(tokens) or (align and rows > sum(-(-n // align) for n in lengths))
        return
    for number in (0, 2):
        batches = epoch(streams, number)
        assert sorted(flat(rows_of(batches, "targets"))) == tokens.tolist()
        for batch in batches:
            assert batch.tokens == int((batch.targets != -100).sum())
            padded = batch.targets == -100
            assert batch.reset.shape == (rows, -(-batch.inputs.shape[1] // align) if align else 1)
            assert torch.equal(batch.padding, padded) if batch.padding is not None else not padded.any()


def test_rows_laid_end_to_end_are_the_corpus():
    tokens, starts = corpus(10, 3, 12)
    batches = epoch(Streams(tokens, starts, START, 3, 4))
    rows = rows_of(batches, "targets")
    assert flat(rows) == tokens.tolist()
    assert [len(row) for row in rows] == [8, 8, 9]
    # The inputs of a row are its previous targets; the first input is `start`.
    assert flat(rows_of(batches, "inputs")) == [START, *tokens[:-1].tolist()]
    assert flat(rows_of(batches, "positions")) == [*range(10), *range(3), *range(12)]
    assert [batch.reset.tolist() for batch in batches] == [[[True]] * 3, [[False]] * 3, [[False]] * 3]
    assert batches[0].padding is None and batches[2].inputs.shape == (3, 1)


def test_aligned_documents_begin_with_a_reset_and_without_the_past():
    tokens, starts = corpus(5, 3, 8)
    streams = Streams(tokens, starts, START, 1, 4, align=4)
    batches = epoch(streams)
    assert [batch.inputs[0].tolist() for batch in batches] == [
        [START, 100, 101, 102],
        [103, START, START, START],
        [START, 105, 106, START],
        [START, 108, 109, 110],
        [111, 112, 113, 114],
    ]
    assert [bool(batch.reset) for batch in batches] == [True, False, True, True, False]
    assert [int(batch.padding.sum()) for batch in batches] == [0, 3, 1, 0, 0]
    # The next epoch starts again.
    assert streams.batch(5).reset.all() and torch.equal(streams.batch(5).inputs, batches[0].inputs)


def test_a_document_begins_at_the_next_segment_of_a_step():
    tokens, starts = corpus(5, 3, 8)
    batches = epoch(Streams(tokens, starts, START, 1, 8, align=2))
    assert [batch.inputs[0].tolist() for batch in batches] == [
        [START, 100, 101, 102, 103, START, START, 105],
        [106, START, START, 108, 109, 110, 111, 112],
        [113, 114],
    ]
    assert [batch.reset[0].int().tolist() for batch in batches] == [[1, 0, 0, 1], [0, 1, 0, 0], [0]]


def test_packed_documents_follow_each_other_without_the_past():
    tokens, starts = corpus(5, 3, 7)
    batches = epoch(Streams(tokens, starts, START, 1, 4, packed=True))
    assert [batch.inputs[0].tolist() for batch in batches] == [
        [START, 100, 101, 102],
        [103, START, 105, 106],
        [START, 108, 109, 110],
        [111, 112, 113],
    ]
    assert [batch.told[0].tolist() for batch in batches] == [[0] * 4, [0, 1, 1, 1], [2] * 4, [2] * 3]
    assert [bool(batch.reset) for batch in batches] == [True, False, True, False]
    assert Streams(tokens, starts, START, 1, 4).batch(0).told is None
    short = epoch(Streams(tokens, starts, START, 2, 8, packed=True))[0]
    assert short.told.tolist() == [[0] * 5 + [1] * 2 + [-1], [1] + [2] * 7]


def test_documents_are_shuffled_by_seed_and_epoch():
    tokens, starts = corpus(*[4] * 8)
    orders = [
        rows_of(epoch(Streams(tokens, starts, START, 1, 4, seed=seed), number), "targets")[0]
        for seed, number in ((0, 0), (0, 0), (0, 1), (1, 0), (None, 0))
    ]
    assert orders[0] == orders[1] and orders[4] == tokens.tolist()
    assert len({tuple(order) for order in orders}) == 4
    for order in orders:  # whole documents, each in order
        assert all(order[i : i + 4] == list(range(order[i], order[i] + 4)) for i in range(0, 32, 4))


def test_a_step_is_a_function_of_its_number_and_rows_of_processes_fit_together():
    tokens, starts = corpus(30, 31)
    ordered, fresh = (Streams(tokens, starts, START, 4, 3, seed=1) for _ in range(2))
    for step in range(14):
        ordered.batch(step)
    for step in (13, 2, 9):
        whole, parts = fresh.batch(step), [ordered.batch(step, slice(i, i + 2)) for i in (0, 2)]
        for name in ("inputs", "targets", "reset", "positions"):
            assert torch.equal(getattr(whole, name), torch.cat([getattr(part, name) for part in parts]))
        assert all(part.tokens == whole.tokens for part in parts)


def test_the_last_step_is_cut_and_more_rows_than_text_are_refused():
    tokens, starts = corpus(2 * 21)
    last = epoch(Streams(tokens, starts, START, 2, 8, unit=4))[-1]
    assert last.inputs.shape == (2, 8) and last.tokens == 10
    last = epoch(Streams(tokens[:36], starts, START, 2, 8, unit=4))[-1]
    assert last.inputs.shape == (2, 4) and last.tokens == 4
    tokens, starts = corpus(5, 5)
    refuses(r"11.*10", Streams, tokens, starts, START, 11, 2)
    with pytest.raises(ValueError, match="3 rows exceeds the 2 segments of 8 tokens that the documents fill"):
        Streams(tokens, starts, START, 3, 8, align=8)


@pytest.mark.parametrize("align", [0, 4])
def test_targets_tell_their_document_and_their_place_in_it(align: int) -> None:
    tokens, starts = corpus(5, 9, 1, 6)
    for batch in epoch(Streams(tokens, starts, START, 2, 4, align=align, seed=3)):
        valid = batch.targets != -100
        place = starts[batch.documents[valid].numpy()] + batch.positions[valid].numpy()
        assert tokens[place].tolist() == batch.targets[valid].tolist()


SHARDS = [["a0", "a1", "a2"], [], ["c0"], ["d0", "d1", "d2", "d3", "d4"], ["e0", "e1"]]
ALL = sorted(item for shard in SHARDS for item in shard)


class Reader(Iterator[str]):
    def __init__(self, items: list[str], at: int) -> None:
        self.items, self.at = items, at

    def __next__(self) -> str:
        if self.at >= len(self.items):
            raise StopIteration
        self.at += 1
        return self.items[self.at - 1]

    def place(self) -> int:
        return self.at


class Lists:
    """Shards in memory that record each opening."""

    def __init__(self, shards: list[list[str]] = SHARDS) -> None:
        self.shards, self.names = shards, [f"list {number}" for number in range(len(shards))]
        self.opened: list[tuple[int, int]] = []

    def read(self, shard: int, place: int | None = None) -> Reader:
        self.opened.append((shard, place or 0))
        return Reader(self.shards[shard], place or 0)


@pytest.mark.parametrize(("window", "seed"), [(1, None), (1, 3), (4, 3), (100, 3)])
def test_every_epoch_has_every_item_once(window: int, seed: int | None) -> None:
    dealer = Dealer(Lists(), window=window, seed=seed)
    epochs = [list(islice(dealer, len(ALL))) for _ in range(4)]
    assert [sorted(epoch) for epoch in epochs] == [ALL] * 4 and dealer.given == 4 * len(ALL)
    if seed is None:
        assert epochs == [[item for shard in SHARDS for item in shard]] * 4
    else:
        assert epochs[0] != epochs[1] != epochs[2]
        assert list(islice(Dealer(Lists(), window=window, seed=seed + 1), len(ALL))) != epochs[0]


@pytest.mark.parametrize("window", [1, 4, 100])
def test_it_goes_on_from_every_place(window: int) -> None:
    whole = list(islice(Dealer(Lists(), window, 5), 40))
    dealer = Dealer(Lists(), window, 5)
    for taken in range(30):
        state = json.loads(json.dumps(dealer.state()))
        assert from_tensor(as_tensor(state)) == state
        other = Dealer(Lists(), window, 5)
        other.go_on(state)
        assert other.state() == state and other.given == taken
        assert list(islice(other, 40 - taken)) == whole[taken:]
        assert next(dealer) == whole[taken]


def test_going_on_reads_the_window_again_or_is_refused() -> None:
    dealer = Dealer(Lists([[f"{s}.{i}" for i in range(50)] for s in range(4)]), window=10, seed=0)
    state = [next(dealer) and dealer.state() for _ in range(75)][-1]
    data = Lists([[f"{s}.{i}" for i in range(50)] for s in range(4)])
    other = Dealer(data, window=10, seed=0)
    other.go_on(state)
    assert len(data.opened) == 1 and data.opened[0][1] == 20 and len(other._held) == 10
    refuses(r"list . and 1 other shards hold no item", next, Dealer(Lists([[], []])))
    dealer = Dealer(Lists(), window=4, seed=0)
    next(dealer)
    refuses(r"have 2 shards, and had 5", Dealer(Lists(SHARDS[:2]), window=4, seed=0).go_on, dealer.state())
    list(islice(dealer, 3))  # the window is given out
    with pytest.raises(ValueError, match=r"has fewer items than when"):
        Dealer(Lists([[], [], ["c0"], [], []]), window=4, seed=0).go_on(dealer.state())
