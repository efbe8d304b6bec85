"""How files are written: whole or not at all, and forced to disk. Neither a kill nor a power cut leaves a part."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class NotWritten(OSError):
    """A file or folder could not be written, whatever the reason; the message names it and says what is safe.

    A class of its own, since OSError turns into FileNotFoundError and its like by the number of the error, which stand
    for bad input where a user names a file.
    """

    def __init__(self, what: str, error: OSError, safe: str) -> None:
        """`what` could not be written because of `error`; `safe` is the rest of the message."""
        super().__init__(error.errno, f"{what} could not be written ({error.strerror or error}); {safe}")


def write_whole(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a file, given whole or in pieces, so that a reader sees the old one or the new one, never a part.

    A file that holds the content already is left alone. What killed processes of this machine left half-written of this
    file is removed.

    Raises:
        NotWritten: the disk is full, or the folder cannot be written; the file is as it was.
    """
    try:
        if isinstance(content, bytes) and _holds(path, content):
            return
        _remove_leftovers(path)
        temporary = path.with_name(f"{_prefix(path)}{os.getpid()}.partial")
        try:
            write_durably(temporary, content)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        if error.errno is None:  # of what the pieces are read from
            raise
        raise NotWritten(str(path), error, "what it held before is untouched") from error


def write_durably(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a file in place and force it to disk, for a file that nobody reads before it has its name."""
    with path.open("wb") as file:
        file.writelines([content] if isinstance(content, bytes) else content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Force a folder's entries to disk, where the system offers that."""
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def json_text(value: Any) -> bytes:
    """The value as JSON, with null in place of numbers that JSON does not know."""
    return json.dumps(jsonable(value), indent=1).encode()


def jsonable(value: Any) -> Any:
    """The same tree with null in place of non-finite numbers, which JSON does not know."""
    if isinstance(value, Mapping):
        return {key: jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _holds(path: Path, content: bytes) -> bool:
    try:
        return path.stat().st_size == len(content) and path.read_bytes() == content
    except (FileNotFoundError, NotADirectoryError):
        return False


def _prefix(path: Path) -> str:
    """Beginning of the names under which this machine writes a file; the number of the process follows."""
    machine = hashlib.sha256(platform.node().encode()).hexdigest()[:8]
    return f".{path.name}.{machine}."


def _remove_leftovers(path: Path) -> None:
    prefix = _prefix(path)
    for name in os.listdir(path.parent):
        found = re.fullmatch(r"(\d+)\.partial", name.removeprefix(prefix)) if name.startswith(prefix) else None
        if found is not None and not lives(int(found[1])):
            path.with_name(name).unlink(missing_ok=True)


def lives(process: int) -> bool:
    """Whether a process of this machine runs; true where the system does not say."""
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
