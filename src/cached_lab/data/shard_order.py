"""Items of shards that are read one after the other, in an order that can be gone on with in its middle.

What does not fit a disk has no index: a shard is read from its beginning to its end, once. The order of its items is
still a function of seed and epoch. Each part of the shards has an order of its own, drawn anew each epoch, and items
are drawn within windows of so many: a window is read whole, permuted and given out before the next one is read. So a
place in the data is where the window begins and how many of it were given. Nothing of the data has to be saved, and no
more of it than a window is in memory.

A part is a fixed share of the shards, for a fixed share of the rows of a batch, whoever reads them. A process reads the
parts of its own rows, so that the number of processes changes who reads what and not what is learned.
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
"""Tell the order of shards from that within a window, and both from other draws with the same seed."""


class ShardReader(Iterator[T_co], Protocol[T_co]):
    """Items of one shard."""

    def place(self) -> Any:
        """What JSON can hold, from which `Sharded.read` goes on behind the last item."""


class Sharded(Protocol[T_co]):
    """Data in shards, each of which can be read from its beginning or from a place.

    Attributes:
        names: of the shards, for messages.
    """

    @property
    def names(self) -> Sequence[str]: ...

    def read(self, shard: int, place: Any = None) -> ShardReader[T_co]: ...


class Dealer(Generic[T]):
    """The items of one part, endlessly: every epoch has each of them once.

    Args:
        data: the shards. part, parts: every `parts`-th shard from `part` on is read.
        window: items that are permuted together, and held at a time. seed: None reads in the order of the shards.

    Attributes:
        given: items that were given out, over all epochs.

    Raises:
        ValueError: fewer shards than parts, a window below 1 or without a seed; later, a part without any item.
    """

    def __init__(
        self, data: Sharded[T], part: int = 0, parts: int = 1, window: int = 1, seed: int | None = None
    ) -> None:
        if window < 1:
            raise ValueError(f"data.window={window} must be at least 1 item; 1 reads the items of a shard in order")
        if parts < 1 or parts > len(data.names):
            raise ValueError(
                f"data.parts={parts} must lie between 1 and the number of shards, {len(data.names)}; lower it, or cut "
                "the data into more files"
            )
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
        """Where the order stands, as JSON."""
        return {**self._begin, "taken": self._taken, "given": self.given, "shards": len(self._data.names)}

    def go_on(self, state: dict[str, Any]) -> None:
        """Stand where `state` was made; the window it was made in is read again (ValueError: of other shards)."""
        if state["shards"] != len(self._data.names):
            raise ValueError(
                f"the data have {len(self._data.names)} shards, and had {state['shards']} when the checkpoint was "
                "written; give the same ones, or train into another folder"
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
            order = self._drawn(_WINDOW, self.given).permutation(len(self._held))
            self._held = [self._held[place] for place in order]
        self._taken = 0

    def _order(self) -> Sequence[int]:
        """The shards of the epoch."""
        if self._seed is None:
            return self._own
        return [int(shard) for shard in self._drawn(_SHARDS, self._epoch).permutation(self._own)]

    def _drawn(self, kind: int, number: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64([self._seed or 0, self._part, number, kind]))

    def _name(self) -> str:
        return self._data.names[self._order()[self._turn]]


class Parts(NamedTuple):
    """Which parts the rows of a batch are of: as many rows each, one behind the other.

    Attributes:
        each: rows of a part. own: the parts that a process reads.
    """

    each: int
    own: range

    @classmethod
    def of_rows(cls, parts: int, batch_size: int, first: int, rows: int) -> Parts:
        """The parts of `rows` rows from `first` on (ValueError: the batch does not divide evenly)."""
        if parts < 1 or batch_size % parts:
            raise ValueError(
                f"data.parts={parts} must divide training.batch_size={batch_size}: each part fills as many rows"
            )
        each = batch_size // parts
        return cls(each, range(first // each, -(-(first + rows) // each)))


def as_tensor(state: dict[str, Any]) -> Tensor:
    """A state as bytes, for a checkpoint."""
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def from_tensor(bytes_N: Tensor) -> dict[str, Any]:
    """The state that `as_tensor` was given."""
    state: dict[str, Any] = json.loads(bytes(bytes_N.tolist()))
    return state
