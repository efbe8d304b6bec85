"""Makes one change on disk below a folder fail: the disk is full, or broken, once.

What is counted: making a folder, opening to write, writing, flushing, closing, forcing to disk, renaming, truncating.
"""

from __future__ import annotations

import builtins
import io
import os
import pathlib
import sys
from pathlib import Path
from typing import Any

_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EVENTS = ("os.rename", "os.mkdir", "os.truncate")


class Failing:
    """Counts the changes below `folder` from now on, in this process, for good.

    Args:
        number: this one fails, from 0; None only counts. errno: how.

    Attributes:
        met: what was counted. failed: the path of what failed.
    """

    def __init__(self, folder: Path, number: int | None, errno: int) -> None:
        self.folder, self.number, self.errno = os.path.realpath(folder), number, errno
        self.met: list[str] = []
        self.failed: str | None = None
        sys.addaudithook(self._audit)
        opened = io.open

        def watched(file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
            handle = opened(file, mode, *rest, **named)
            below = set(mode) & set("wax+") and self._below(file)
            return _Watched(handle, self, file) if below else handle

        builtins.open = io.open = watched  # type: ignore[assignment]
        if hasattr(pathlib, "_NormalAccessor"):  # Python 3.10 keeps a reference
            pathlib._NormalAccessor.open = staticmethod(watched)
        for name in ("fsync", "write", "ftruncate"):
            self._wrap(name)

    def meet(self, what: str, path: Any) -> None:
        """Count a change, or fail at it."""
        if not self._below(path):
            return
        self.met.append(f"{what} {os.path.basename(self._name(path))}")
        if len(self.met) - 1 == self.number:
            self.failed = self._name(path)
            raise OSError(self.errno, os.strerror(self.errno), *([] if what in ("write", "flush", "close") else [path]))

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and arguments[2] & _CHANGES and not isinstance(arguments[0], int):
            self.meet("open", arguments[0])
        elif event in _EVENTS and not (event == "os.mkdir" and os.path.isdir(arguments[0])):
            self.meet(event.removeprefix("os."), arguments[1] if event == "os.rename" else arguments[0])

    def _wrap(self, name: str) -> None:
        original = getattr(os, name)

        def failing(file: Any, *rest: Any) -> Any:
            self.meet("write" if name == "write" else name, file)
            return original(file, *rest)

        setattr(os, name, failing)

    def _below(self, path: Any) -> bool:
        return f"{os.path.abspath(self._name(path))}/".startswith(f"{self.folder}/")

    @staticmethod
    def _name(path: Any) -> str:
        if isinstance(path, int):
            place = f"/proc/self/fd/{path}"
            return os.readlink(place) if os.path.islink(place) else ""
        return os.fsdecode(path)


class _Watched:
    """A file opened to write, of which writing, flushing and closing count; all else is the file's own."""

    def __init__(self, file: Any, failing: Failing, path: Any) -> None:
        self._file, self._failing, self._path = file, failing, path

    def write(self, content: Any) -> Any:
        self._failing.meet("write", self._path)
        return self._file.write(content)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._failing.meet("flush", self._path)
        self._file.flush()

    def close(self) -> None:
        if not self._file.closed:
            self._file.close()
            self._failing.meet("close", self._path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Watched:
        return self

    def __exit__(self, *problem: Any) -> None:
        self.close()

    def __iter__(self) -> Any:
        return iter(self._file)
