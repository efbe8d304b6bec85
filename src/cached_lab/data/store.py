"""Arrays cached on disk between processes: written atomically, checked by digest, rebuilt when damaged.

A file holds a SHA-256 (64 hexadecimal digits and a line feed) followed by a numpy archive. Its name holds the digest of
everything that decides the content, and is hashed with the archive, so that a file under a wrong name is damaged, too.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from cached_transformers.files import write_whole

Arrays = dict[str, np.ndarray]


def cache_folder() -> Path:
    """Folder of cached data: $CACHED_TRANSFORMERS_CACHE, else cached-transformers in $XDG_CACHE_HOME or ~/.cache."""
    folder, caches = os.environ.get("CACHED_TRANSFORMERS_CACHE"), os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(folder or f"{caches}/cached-transformers").expanduser()


def entry_path(kind: str, key: Mapping[str, object]) -> Path:
    """File of the arrays of `kind` built from `key` (JSON-serialisable)."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder() / f"{kind}-{digest[:24]}.cache"


def load_or_build(kind: str, key: Mapping[str, object], build: Callable[[], Arrays]) -> Arrays:
    """Load the arrays cached under (`kind`, `key`), or build and cache them.

    A damaged file is replaced, and a folder that cannot be written is no error; both give a RuntimeWarning.
    """
    path = entry_path(kind, key)
    if (arrays := _read(path)) is None:
        arrays = build()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez(buffer := io.BytesIO(), allow_pickle=False, **arrays)
            payload = buffer.getvalue()
            write_whole(path, _digest(path, payload) + b"\n" + payload)
        except OSError as error:
            way = "set CACHED_TRANSFORMERS_CACHE to a folder that can be written"
            warnings.warn(f"cannot keep generated data in {path.parent} ({error}); {way}", RuntimeWarning, 2)
    return arrays


def _read(path: Path) -> Arrays | None:
    try:
        content = path.read_bytes()
    except OSError:  # usually not there
        return None
    digest, _, payload = content.partition(b"\n")
    if digest != _digest(path, payload):
        warnings.warn(f"{path} is damaged (its checksum differs); generating its content again", RuntimeWarning, 3)
        return None
    with np.load(io.BytesIO(payload), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def _digest(path: Path, payload: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + b"\n" + payload).hexdigest().encode()
