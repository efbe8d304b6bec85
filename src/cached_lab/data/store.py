"""Arrays kept on disk between processes: written atomically, checked by digest, rebuilt when damaged.

One file holds a SHA-256 (64 hexadecimal digits and a line feed) followed by the payload, a numpy archive. The name
holds the digest of everything that decides the content, and is hashed with the payload: a file under the name of
another is as wrong as one with a flipped bit. Older files, of whose payload alone the digest is, are read, too.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from cached_transformers.files import write_whole

Arrays = dict[str, np.ndarray]


def cache_folder() -> Path:
    """Where generated data is kept: $CACHED_TRANSFORMERS_CACHE, else ~/.cache/cached-transformers."""
    folder = os.environ.get("CACHED_TRANSFORMERS_CACHE")
    return Path(folder).expanduser() if folder else Path.home() / ".cache" / "cached-transformers"


def entry_path(kind: str, key: Mapping[str, object]) -> Path:
    """File that keeps the arrays of `kind` built from `key` (JSON-serialisable)."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder() / f"{kind}-{digest[:24]}.cache"


def load_or_build(kind: str, key: Mapping[str, object], build: Callable[[], Arrays]) -> Arrays:
    """The arrays kept under (`kind`, `key`), or those that `build` makes, which are then kept.

    A damaged file is reported (RuntimeWarning) and replaced. When the folder cannot be written the arrays are
    returned all the same, with a RuntimeWarning that says how to choose another folder.
    """
    path = entry_path(kind, key)
    arrays = _read(path)
    if arrays is None:
        arrays = build()
        _keep(path, arrays)
    return arrays


def _read(path: Path) -> Arrays | None:
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        warnings.warn(f"{path} cannot be read ({error}); generating its content again", RuntimeWarning, stacklevel=3)
        return None
    digest, _, payload = content.partition(b"\n")
    if digest not in (_digest(path, payload), hashlib.sha256(payload).hexdigest().encode()):
        message = f"{path} is damaged (its checksum differs); generating its content again"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
        return None
    with np.load(io.BytesIO(payload), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def _keep(path: Path, arrays: Arrays) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        payload = _serialise(arrays)
        write_whole(path, _digest(path, payload) + b"\n" + payload)
    except OSError as error:
        message = (
            f"cannot keep generated data in {path.parent} ({error}), so the next process generates it again; "
            "set CACHED_TRANSFORMERS_CACHE to a folder that can be written"
        )
        warnings.warn(message, RuntimeWarning, stacklevel=3)


def _serialise(arrays: Arrays) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, array in arrays.items():
            member = io.BytesIO()
            np.save(member, array, allow_pickle=False)
            # A fixed date makes the file a pure function of the arrays.
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), member.getvalue(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _digest(path: Path, payload: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + b"\n" + payload).hexdigest().encode()
