"""What tells the data of a run from other data under the same name: how many rows there are, and a hash of samples.

A data set takes part by a method `samples()`, which gives arrays and bytes that its content decides, and that are at
hand or cheaply read: of a data set of any size some sixteen files. What is generated gives its rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

WHOLE = 64 << 20
"""Bytes of an array that are hashed all; of a larger one evenly spaced blocks that are as much together."""
_BLOCK = 64 << 10
_READ = 16

Sample = np.ndarray | bytes


def described(dataset: Any) -> dict[str, object]:
    """Rows of a split, and a SHA-256 of its samples where the data set gives some; a stream has shards for rows."""
    facts: dict[str, object] = {"size": dataset.shards if is_stream(dataset) else len(dataset)}
    if hasattr(dataset, "samples"):
        facts["sha256"] = digest_of(dataset.samples())
    return facts


def is_stream(dataset: Any) -> bool:
    """Whether a split is read in order and has neither a length nor an item by number."""
    return bool(getattr(dataset, "streamed", False))


def digest_of(samples: Iterable[Sample]) -> str:
    """SHA-256 of arrays (with type and shape) and bytes, in their order."""
    digest = hashlib.sha256()
    for sample in samples:
        if isinstance(sample, bytes):
            digest.update(f"bytes {len(sample)}\n".encode())
            digest.update(sample)
            continue
        digest.update(f"{sample.dtype.str} {sample.shape}\n".encode())
        flat = np.ascontiguousarray(sample).reshape(-1).view(np.uint8)
        for block in _blocks(flat):
            digest.update(block.tobytes())
    return digest.hexdigest()


def read_samples(count: int, read: Callable[[int], bytes]) -> Iterator[bytes]:
    """The content of some evenly spaced items of `count`, the first and the last among them; none of bad ones."""
    for index in np.unique(np.linspace(0, max(count - 1, 0), _READ).astype(np.int64)) if count else ():
        try:
            yield read(int(index))
        except (OSError, ValueError):
            yield b""


def _blocks(flat: np.ndarray) -> Iterator[np.ndarray]:
    if flat.nbytes <= WHOLE:
        yield flat
        return
    for begin in np.linspace(0, flat.nbytes - _BLOCK, WHOLE // _BLOCK).astype(np.int64):
        yield flat[begin : begin + _BLOCK]
