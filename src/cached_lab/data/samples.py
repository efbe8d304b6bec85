"""Fingerprint of a data set: its number of rows, and a hash of samples.

A data set takes part by a method `samples()`, which yields arrays and bytes that identify its content and are cheap to
read: for files, sixteen of them; for generated data, all rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

WHOLE = 64 << 20
"""Bytes of an array that are hashed; of a larger array, evenly spaced blocks of the same total size."""
_BLOCK = 64 << 10
_READ = 16

Sample = np.ndarray | bytes


def described(dataset: Any) -> dict[str, object]:
    """Rows (or shards, of a stream) of a split, and a SHA-256 of its samples where it has any."""
    facts: dict[str, object] = {"size": dataset.shards if is_stream(dataset) else len(dataset)}
    if hasattr(dataset, "samples"):
        facts["sha256"] = digest_of(dataset.samples())
    return facts


def is_stream(dataset: Any) -> bool:
    """Tell if a split is read in order, without length and items by number."""
    return bool(getattr(dataset, "streamed", False))


def digest_of(samples: Iterable[Sample]) -> str:
    """SHA-256 of arrays (with type and shape) and bytes, in order."""
    digest = hashlib.sha256()
    for sample in samples:
        if isinstance(sample, bytes):
            digest.update(f"bytes {len(sample)}\n".encode())
            digest.update(sample)
            continue
        digest.update(f"{sample.dtype.str} {sample.shape}\n".encode())
        flat = np.ascontiguousarray(sample).reshape(-1).view(np.uint8)
        if flat.nbytes <= WHOLE:
            digest.update(flat.tobytes())
            continue
        for begin in np.linspace(0, flat.nbytes - _BLOCK, WHOLE // _BLOCK).astype(np.int64):
            digest.update(flat[begin : begin + _BLOCK].tobytes())
    return digest.hexdigest()


def read_samples(count: int, read: Callable[[int], bytes]) -> Iterator[bytes]:
    """Read evenly spaced items of `count`, including the first and the last; a bad item counts as empty."""
    for index in np.unique(np.linspace(0, max(count - 1, 0), _READ).astype(np.int64)) if count else ():
        try:
            yield read(int(index))
        except (OSError, ValueError):
            yield b""
