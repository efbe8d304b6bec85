"""A store of blocks that grows without copies: a tensor whose rows are lists of blocks, in memory or in a file.

A block never changes after it was written, and states share their blocks: to seal a state, to mark it, to reorder beams
and to go back copy lists, not keys. A block is freed with the last state that holds it.

Every operation that is not listed here gets the numbers in one tensor, as `contiguous` gives them.

Legend: B rows, C blocks of the longest row, X heads of all keys, then of all values, b tokens of a block, E head width;
V layers, G heads of keys, Q queries of each.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

ATEN = torch.ops.aten
SLAB = 2**25
"""Bytes that glibc never takes from its heap."""


class BlockMemory:
    """Records of equal size in slabs of memory: among temporaries, blocks that stay would leave holes in the heap."""

    def __init__(self) -> None:
        self.free: list[Tensor] = []
        self.records = 0

    def write(self, record: Tensor) -> Tensor:
        """Copy a record into a free place."""
        try:
            place = self.free.pop()
        except IndexError:
            size = record.numel()
            count = min(max(self.records, 1), -(-SLAB // size))
            with torch.inference_mode(False):  # such a tensor could not be written in another mode
                place, *rest = torch.empty(count, size, dtype=torch.uint8, device=record.device)
            self.free += rest
            self.records += count
        return place.copy_(record)

    def read(self, place: Tensor, size: int, length: int) -> Tensor:
        """The first bytes of a record of `size` bytes."""
        return place[:length]


class BlockFile:
    """Records of equal size in a file without a name, which the system removes with it."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (lives as long as its blocks)
        except OSError as error:
            raise ValueError(f"folder={str(folder)!r}: {error.strerror}; give one that can be written") from error
        self.free: list[int] = []
        self.records = 0

    def __del__(self) -> None:
        if hasattr(self, "file"):
            self.file.close()

    def write(self, record: Tensor) -> int:
        """Write one record, and return its number."""
        number = self.free.pop() if self.free else self.records
        self.file.seek(number * record.numel())
        self.file.write(record.cpu().numpy().tobytes())
        self.file.flush()
        self.records = max(self.records, number + 1)
        return number

    def read(self, number: int, size: int, length: int) -> Tensor:
        """The first bytes of a record of `size` bytes."""
        return torch.from_numpy(np.array(np.memmap(self.file, np.uint8, "r+", offset=number * size, shape=length)))


class StoredBlock:
    """Keys and values of b tokens, as they are or as 8-bit integers after a scale for each vector; head by head."""

    def __init__(self, t_XbE: Tensor, dtype: torch.dtype, store: Any) -> None:
        self.shape, self.dtype, self.store, t_XbE = t_XbE.shape, dtype, store, t_XbE.detach()
        scale = []
        if dtype == torch.int8:
            scale = [t_XbE.float().abs().amax(-1, keepdim=True) / 127]
            t_XbE = (t_XbE / scale[0].clamp(min=torch.finfo(torch.float32).tiny)).round()
        parts = [part.flatten(1).contiguous().view(torch.uint8) for part in (*scale, t_XbE.to(dtype))]
        record_XY = torch.cat(parts, 1)
        self.head, self.place = record_XY.shape[1], store.write(record_XY.flatten())

    def __del__(self) -> None:
        if hasattr(self, "place"):
            self.store.free.append(self.place)

    def read(self, heads: int, like: Tensor) -> Tensor:
        """(heads, b, E): the first heads, in the dtype and on the device of `like`."""
        t_XY = self.store.read(self.place, self.shape[0] * self.head, heads * self.head).view(heads, self.head)
        scales = 4 * self.shape[1] if self.dtype == torch.int8 else 0
        t_XbE = t_XY[:, scales:].view(self.dtype).unflatten(1, self.shape[1:]).to(like.device, like.dtype)
        return t_XbE * t_XY[:, :scales].contiguous().view(torch.float32)[..., None].to(t_XbE) if scales else t_XbE


class Blocks(Tensor):
    """(B, C, X, b, E): the blocks of each row, number n in place n mod the capacity."""

    rows: tuple[tuple[StoredBlock, ...], ...]
    grows = True
    """Told `state`: a state has any number of blocks."""

    @staticmethod
    def __new__(cls, rows: Sequence[Sequence[StoredBlock]], like_XbE: Tensor) -> Blocks:
        size = (len(rows), max([0, *map(len, rows)]), *like_XbE.shape)
        made = Tensor._make_wrapper_subclass(cls, size, dtype=like_XbE.dtype, device=like_XbE.device)
        made.rows = tuple(map(tuple, rows))
        return made  # type: ignore[no-any-return]

    def with_rows(self, rows: Sequence[Sequence[StoredBlock]]) -> Blocks:
        """A store of these rows."""
        return Blocks(rows, torch.empty(self.shape[2:], dtype=self.dtype, device=self.device))

    def contiguous(self, *_: Any, **__: Any) -> Tensor:
        """The numbers in one tensor; zeros where a row has no block."""
        whole = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        for row, blocks in enumerate(self.rows):
            for place, block in enumerate(blocks):
                whole[row, place] = block.read(self.shape[2], whole)
        return whole

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.contiguous().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Blocks:
        return self.with_rows(self.rows)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first, kwargs = args[0], kwargs or {}
        if call in (ATEN.detach.default, ATEN.clone.default):
            return first.with_rows(first.rows)
        if call is ATEN.index_select.default and args[1] == 0:
            return first.with_rows([first.rows[i] for i in args[2].tolist()])
        if call is ATEN.index.Tensor and len(args[1]) == 1 and args[1][0].dtype == torch.long:
            return first.with_rows([first.rows[i] for i in args[1][0].tolist()])
        if call is ATEN.slice.Tensor and (*args, 0)[1] == 0:
            return first.with_rows(first.rows[slice(*args[2:])])
        if call is ATEN.cat.default and (*args, 0)[1] == 0:
            one = next(t for t in first if isinstance(t, Blocks))
            return one.with_rows([row for t in first for row in rows_of(t, t.dtype, BlockMemory())])
        args, kwargs = tree_map(lambda t: t.contiguous() if isinstance(t, Blocks) else t, (args, kwargs))
        return call(*args, **kwargs)

    def map_keys(self, q_BVGQE: Tensor, score: Callable[[Tensor, Tensor], Tensor], chunk: int) -> Tensor:
        """(B, C, ...): the score of each block's keys for the queries of its row; `chunk` bytes of keys at once."""
        heads = math.prod(q_BVGQE.shape[1:3])
        step = max(chunk // max(heads * math.prod(self.shape[3:]) * q_BVGQE.element_size(), 1), 1)
        found = q_BVGQE.new_zeros(self.shape[:2] + q_BVGQE.shape[1:-1])
        for row, blocks in enumerate(self.rows):
            for place in range(0, len(blocks), step):
                keys = [block.read(heads, q_BVGQE) for block in blocks[place : place + step]]
                found[row, place : place + len(keys)] = score(q_BVGQE[row : row + 1], torch.stack(keys)[None])[0]
        return found


def rows_of(t_BCXbE: Tensor, dtype: torch.dtype, store: Any) -> Sequence[Sequence[StoredBlock]]:
    """The blocks of each row; new ones for a store whose numbers are in one tensor."""
    if isinstance(t_BCXbE, Blocks):
        return t_BCXbE.rows
    return [[StoredBlock(t_XbE, dtype, store) for t_XbE in row] for row in t_BCXbE.unbind()]


def append(
    blocks_BCXbE: Tensor,
    new_BJXbE: Tensor,
    written_B: Tensor,
    count_B: Tensor,
    *,
    capacity: int | None,
    dtype: torch.dtype,
    folder: str | os.PathLike[str] | None,
) -> Blocks:
    """The store after the first `count_B` new blocks of each row.

    Args:
        blocks_BCXbE: a growing store, or its numbers in one tensor. written_B: blocks ever written.
        capacity: most blocks of a row; None for no limit. dtype: that blocks are kept in. folder: of the file that
            holds them; None for memory.
    """
    stores = [row[0].store for row in blocks_BCXbE.rows if row] if isinstance(blocks_BCXbE, Blocks) else []
    if not stores or (folder is not None and not isinstance(stores[0], BlockFile)):
        stores = [BlockMemory() if folder is None else BlockFile(folder)]
    rows, before = [], rows_of(blocks_BCXbE, dtype, stores[0])
    for row, (written, count) in enumerate(zip(written_B.tolist(), count_B.tolist(), strict=True)):
        held = list(before[row][:written])  # a row that was reset begins again
        for number, t_XbE in enumerate(new_BJXbE[row, :count], written):
            block = StoredBlock(t_XbE, dtype, stores[0])
            if capacity is None or number < capacity:
                held.append(block)
            else:
                held[number % capacity] = block
        rows.append(held)
    return Blocks(rows, torch.empty(blocks_BCXbE.shape[2:], dtype=blocks_BCXbE.dtype, device=blocks_BCXbE.device))


def pick(blocks_BCXbE: Tensor, number_BK: Tensor) -> Tensor:
    """(B, K, X, b, E): the blocks of these numbers; arbitrary where the number is below 0."""
    places = blocks_BCXbE.shape[1]
    if not places:
        return number_BK.new_zeros((*number_BK.shape, *blocks_BCXbE.shape[2:]), dtype=blocks_BCXbE.dtype)
    slot_BK = number_BK.clamp(min=0) % places
    if not isinstance(blocks_BCXbE, Blocks):
        index = slot_BK[:, :, None, None, None].expand(-1, -1, *blocks_BCXbE.shape[2:])
        return blocks_BCXbE.gather(1, index)
    found = torch.zeros(*slot_BK.shape, *blocks_BCXbE.shape[2:], dtype=blocks_BCXbE.dtype, device=blocks_BCXbE.device)
    for row, chosen in enumerate(number_BK.tolist()):
        for place, number in enumerate(chosen):
            if number >= 0:
                found[row, place] = blocks_BCXbE.rows[row][number % places].read(found.shape[2], found)
    return found
