"""The order of items read shard by shard: every item once per epoch, the same after a resume, with one window held."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice

import pytest
from refusals import refuses

from cached_lab.tasks.language.shard_order import Dealer, as_tensor, from_tensor

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


def test_going_on_reads_the_window_again_and_no_more() -> None:
    dealer = Dealer(Lists([[f"{s}.{i}" for i in range(50)] for s in range(4)]), window=10, seed=0)
    state = [next(dealer) and dealer.state() for _ in range(75)][-1]
    data = Lists([[f"{s}.{i}" for i in range(50)] for s in range(4)])
    other = Dealer(data, window=10, seed=0)
    other.go_on(state)
    assert len(data.opened) == 1 and data.opened[0][1] == 20 and len(other._held) == 10


def test_what_cannot_be_dealt_is_refused() -> None:
    refuses(r"list . and 1 other shards hold no item", next, Dealer(Lists([[], []])))
    dealer = Dealer(Lists(), window=4, seed=0)
    next(dealer)
    refuses(r"have 2 shards, and had 5", Dealer(Lists(SHARDS[:2]), window=4, seed=0).go_on, dealer.state())
    list(islice(dealer, 3))  # the window is given out
    with pytest.raises(ValueError, match=r"has fewer items than when"):
        Dealer(Lists([[], [], ["c0"], [], []]), window=4, seed=0).go_on(dealer.state())
