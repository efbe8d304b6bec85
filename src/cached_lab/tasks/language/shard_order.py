"""A resumable order of items in shards that are read one after the other.

Data that exceed a disk have no index: each shard is read once, from beginning to end. The order is still a function of
seed and epoch. The shards of an epoch are permuted; items are permuted within windows, each read whole before the next
one. A position is the start of the window and the number of its items already given, so that a checkpoint holds no
data, and memory holds one window.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_SHARDS, _WINDOW = 2, 3
"""Seed words of the order of shards and the order within a window."""


class HubShards:
    """The texts of a streamed split, shard by shard.

    Args:
        rows: an `IterableDataset` of the library. column: of the text. called: name of the split in messages.
        wanted: filter of texts; None takes all texts that are not blank.

    Raises:
        ValueError: the split lacks the column; while reading, a row without text, or files that cannot be read.
    """

    def __init__(self, rows: Any, column: str, called: str, wanted: Callable[[str], bool] | None = None) -> None:
        columns = rows.column_names
        if columns is not None and column not in columns:
            raise ValueError(f"data.column={column!r}: {called} has {', '.join(columns)}")
        self._rows, self._column, self._wanted = rows, column, wanted
        self.names = [f"{called}, shard {number}" for number in range(rows.num_shards)]

    def read(self, shard: int, place: Any = None) -> HubReader:
        rows = self._rows.shard(num_shards=len(self.names), index=shard)
        if place is not None:
            rows.load_state_dict(place)
        return HubReader(rows, self._column, self._wanted, self.names[shard])


class HubReader(Iterator[str]):
    """The texts of one shard; `place` is the library's own state."""

    def __init__(self, rows: Any, column: str, wanted: Callable[[str], bool] | None, name: str) -> None:
        self._rows, self._column, self._wanted, self._name = rows, column, wanted, name
        self._items = iter(rows)

    def __next__(self) -> str:
        while True:
            try:
                row = next(self._items)
            except StopIteration:
                raise
            except Exception as error:  # of file formats, network or disk
                reason = " ".join(str(error).split())[:300]
                raise ValueError(
                    f"{self._name} cannot be read: {type(error).__name__}: {reason}; the same command goes on from the "
                    "last checkpoint once it can"
                ) from error
            text = row.get(self._column)
            if text is not None and not isinstance(text, str):
                raise ValueError(
                    f"{self._name}: a row holds {type(text).__name__} in column {self._column!r}, not text; choose "
                    f"another data.column of {', '.join(row)}"
                )
            if text and text.strip() and (self._wanted is None or self._wanted(text)):
                return text

    def place(self) -> Any:
        return self._rows.state_dict()


class Dealer(Iterator[str]):
    """The items of all shards, endlessly; each epoch has every item once.

    Args:
        data: the shards.
        window: items that are permuted together, and held at a time. seed: None keeps the order of the shards.

    Attributes:
        given: number of items given, over all epochs.

    Raises:
        ValueError: while reading, shards without any item.
    """

    def __init__(self, data: HubShards, window: int = 1, seed: int | None = None) -> None:
        self._data, self._window, self._seed = data, window, seed
        self.given = 0
        self._epoch, self._turn = 0, 0
        self._reader: HubReader | None = None
        self._begin: dict[str, Any] = {"epoch": 0, "turn": 0, "place": None}
        self._held: list[str] = []
        self._taken = 0

    def __next__(self) -> str:
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
            if self._turn + 1 < len(self._data.names):
                self._turn += 1
            elif self._held:
                break  # no window holds items of two epochs
            elif ends > 1:
                raise ValueError(
                    f"{self._name()} and {len(self._data.names) - 1} other shards hold no item; check the data"
                )
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
            return range(len(self._data.names))
        return [int(shard) for shard in self._generator(_SHARDS, self._epoch).permutation(len(self._data.names))]

    def _generator(self, kind: int, number: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64([self._seed or 0, 0, number, kind]))

    def _name(self) -> str:
        return self._data.names[self._order()[self._turn]]


def as_tensor(state: dict[str, Any]) -> Tensor:
    """Encode a state as bytes, for a checkpoint."""
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def from_tensor(bytes_N: Tensor) -> dict[str, Any]:
    """Decode a state written by `as_tensor`."""
    state: dict[str, Any] = json.loads(bytes(bytes_N.tolist()))
    return state
