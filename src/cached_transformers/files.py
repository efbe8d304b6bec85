"""Atomic, durable file writes: a kill or a power cut leaves no partial file."""

from __future__ import annotations

import json
import math
import os
import platform
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class NotWritten(OSError):
    """A file or folder could not be written; the message names it and says which data are safe.

    It is a class of its own, since OSError(errno, ...) may become FileNotFoundError, which means a wrong input path.
    """

    def __init__(self, what: str, error: OSError, safe: str) -> None:
        super().__init__(error.errno, f"{what} could not be written ({error.strerror or error}); {safe}")


def write_whole(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Replace a file atomically, with content in one or several pieces; equal content is not written again.

    Partial files of killed processes of this machine are removed.

    Raises:
        NotWritten: the disk is full, or the folder cannot be written; the old file is unchanged.
    """
    try:
        if isinstance(content, bytes) and _holds(path, content):
            return
        prefix = f".{path.name}.{platform.node()}."  # temporary files of this machine; the process id follows
        for name in os.listdir(path.parent):
            found = re.fullmatch(r"(\d+)\.partial", name.removeprefix(prefix)) if name.startswith(prefix) else None
            if found is not None and not lives(int(found[1])):
                path.with_name(name).unlink(missing_ok=True)
        temporary = path.with_name(f"{prefix}{os.getpid()}.partial")
        try:
            write_durably(temporary, content)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        if error.errno is None:  # an error of the iterable
            raise
        raise NotWritten(str(path), error, "the old content is untouched") from error


def write_durably(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a file in place and force it to disk, for files that are renamed afterwards."""
    with path.open("wb") as file:
        file.writelines([content] if isinstance(content, bytes) else content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Force a folder's entries to disk, on POSIX systems."""
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def json_text(value: Any) -> bytes:
    """Return the value as JSON, with null for infinities and NaN."""
    return json.dumps(jsonable(value), indent=1).encode()


def jsonable(value: Any) -> Any:
    """Return the tree with None for infinities and NaN, which JSON lacks."""
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


def lives(process: int) -> bool:
    """Return True if a process of this machine runs, or if the system cannot tell."""
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
