"""A resumable order of items in shards that are read one after the other.

Data that exceed a disk have no index: each shard is read once, from beginning to end. The order is still a function of
seed and epoch. The shards of an epoch are permuted; items are permuted within windows, each read whole before the next
one. A position is the start of the window and the number of its items already given, so that a checkpoint holds no
data, and memory holds one window.

A part is a fixed share of the shards for a fixed share of the rows of a batch. A process reads the parts of its own
rows, so that the number of processes does not change what is learned.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
_SHARDS, _WINDOW = 2, 3
"""Seed words of the order of shards and the order within a window."""


class ShardReader(Iterator[T_co], Protocol[T_co]):
    """Items of one shard; `place` is the position after the last item, as JSON."""

    def place(self) -> Any: ...


class ShardSet(Protocol[T_co]):
    """Data in shards with names, which are read from the beginning or from a place."""

    @property
    def names(self) -> Sequence[str]: ...

    def read(self, shard: int, place: Any = None) -> ShardReader[T_co]: ...


class Dealer(Generic[T]):
    """The items of one part, endlessly; each epoch has every item once.

    Args:
        data: the shards. part, parts: read every `parts`-th shard from `part` on.
        window: items that are permuted together, and held at a time. seed: None keeps the order of the shards.

    Attributes:
        given: number of items given, over all epochs.

    Raises:
        ValueError: fewer shards than parts, or a window below 1; while reading, a part without any item.
    """

    def __init__(
        self, data: ShardSet[T], part: int = 0, parts: int = 1, window: int = 1, seed: int | None = None
    ) -> None:
        if window < 1:
            raise ValueError(f"data.window={window} must be at least 1 item; 1 reads the items of a shard in order")
        if parts < 1 or parts > len(data.names):
            raise ValueError(f"data.parts={parts} must lie in 1..{len(data.names)}, the number of shards")
        self._data, self._part, self._window, self._seed = data, part, window, seed
        self._own = range(part, len(data.names), parts)
        self.given = 0
        self._epoch, self._turn = 0, 0
        self._reader: ShardReader[T] | None = None
        self._begin: dict[str, Any] = {"epoch": 0, "turn": 0, "place": None}
        self._held: list[T] = []
        self._taken = 0

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._taken == len(self._held):
            self._fill()
        item = self._held[self._taken]
        self._taken, self.given = self._taken + 1, self.given + 1
        return item

    def state(self) -> dict[str, Any]:
        """Position in the order, as JSON."""
        return {**self._begin, "taken": self._taken, "given": self.given, "shards": len(self._data.names)}

    def go_on(self, state: dict[str, Any]) -> None:
        """Resume from a `state`; its window is read again (ValueError: other shards)."""
        if state["shards"] != len(self._data.names):
            raise ValueError(
                f"the data have {len(self._data.names)} shards, and had {state['shards']} when the checkpoint was "
                "written; give the same shards, or train into another folder"
            )
        self._epoch, self._turn = state["epoch"], state["turn"]
        self._reader = self._data.read(self._order()[self._turn], state["place"])
        self.given, self._held, self._taken = state["given"] - state["taken"], [], 0
        if state["taken"]:
            self._fill()
            if len(self._held) < state["taken"]:
                raise ValueError(f"{self._name()} has fewer items than when the checkpoint was written; fetch it again")
        self._begin = {key: state[key] for key in self._begin}
        self._taken, self.given = state["taken"], state["given"]

    def _fill(self) -> None:
        """Read the next window."""
        if self._reader is None:
            self._reader = self._data.read(self._order()[0])
        else:
            self._begin = {"epoch": self._epoch, "turn": self._turn, "place": self._reader.place()}
        self._held, ends = [], 0
        while len(self._held) < self._window:
            try:
                self._held.append(next(self._reader))
                continue
            except StopIteration:
                pass
            if self._turn + 1 < len(self._own):
                self._turn += 1
            elif self._held:
                break  # no window holds items of two epochs
            elif ends > 1:
                raise ValueError(f"{self._name()} and {len(self._own) - 1} other shards hold no item; check the data")
            else:
                self._epoch, self._turn, ends = self._epoch + 1, 0, ends + 1
            self._reader = self._data.read(self._order()[self._turn])
        if self._seed is not None:
            order = self._generator(_WINDOW, self.given).permutation(len(self._held))
            self._held = [self._held[place] for place in order]
        self._taken = 0

    def _order(self) -> Sequence[int]:
        """The shards of the epoch."""
        if self._seed is None:
            return self._own
        return [int(shard) for shard in self._generator(_SHARDS, self._epoch).permutation(self._own)]

    def _generator(self, kind: int, number: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64([self._seed or 0, self._part, number, kind]))

    def _name(self) -> str:
        return self._data.names[self._order()[self._turn]]


class Parts(NamedTuple):
    """The parts that fill the rows of a batch, with equally many consecutive rows each.

    Attributes:
        each: rows of a part. own: the parts that a process reads.
    """

    each: int
    own: range

    @classmethod
    def of_rows(cls, parts: int, batch_size: int, first: int, rows: int) -> Parts:
        """The parts of `rows` rows from `first` on (ValueError: the batch does not divide evenly)."""
        if parts < 1 or batch_size % parts:
            raise ValueError(f"data.parts={parts} must divide training.batch_size={batch_size}, into equal rows")
        each = batch_size // parts
        return cls(each, range(first // each, -(-(first + rows) // each)))


def as_tensor(state: dict[str, Any]) -> Tensor:
    """Encode a state as bytes, for a checkpoint."""
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def from_tensor(bytes_N: Tensor) -> dict[str, Any]:
    """Decode a state written by `as_tensor`."""
    state: dict[str, Any] = json.loads(bytes(bytes_N.tolist()))
    return state
