"""Kill this process at one file operation below a folder (before or within a write), or make it fail.

Counted operations: open for writing, write, flush, close, truncate, fsync, rename, make and remove. Nothing on disk
changes between two operations, so "after one" is "before the next". Their order is deterministic: a first pass counts
them.
"""

from __future__ import annotations

import builtins
import io
import os
import pathlib
import sys
from pathlib import Path
from typing import Any, NamedTuple

DIED = 77
"""Exit status of a process that was ended here."""
_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EVENTS = {"os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.mkdir": 1, "os.truncate": 1, "os.link": 2}
"""Audit events of one operation each, and how many paths they tell."""
_NEVER_FAIL = ("remove", "rmdir", "link")
"""Operations that a full disk does not hinder."""
_UNNAMED = ("write", "flush", "close")
"""Operations whose error, as Python raises it, names no file."""


class Operation(NamedTuple):
    """One of them: `what` is done and to which file, whether a process can end inside it, and whether it can fail."""

    what: str
    halves: bool
    fails: bool


class Operations:
    """Count the operations below `folder` in this process from now on.

    Args:
        number: the operation to disturb, from 0; None only counts.
        then: "before" or "inside" to end the process, or an errno to raise.

    Attributes:
        met: counted operations. failed: path of the failed one.
    """

    def __init__(self, folder: Path, number: int | None = None, then: str | int = "before") -> None:
        self.folder, self.number, self.then = os.path.realpath(folder), number, then
        self.met: list[Operation] = []
        self.failed: str | None = None
        sys.addaudithook(self._audit)
        self._wrap_open()
        for name in ("fsync", "write", "ftruncate"):
            self._wrap_os(name)

    def meet(self, what: str, path: Any, folder: int = -1, halves: bool = False) -> bool:
        """Count an operation below the folder; whether the process is to end in the midst of it."""
        name = self._file_of(path) if isinstance(path, int) else os.fsdecode(path)
        if folder not in (-1, None):
            name = os.path.join(self._file_of(folder), name)
        name = os.path.abspath(name)
        if not f"{name}/".startswith(f"{self.folder}/"):
            return False
        self.met.append(Operation(f"{what} {name[len(self.folder) + 1 :]}", halves, what not in _NEVER_FAIL))
        if len(self.met) - 1 != self.number:
            return False
        if isinstance(self.then, int):
            self.failed = name
            raise OSError(self.then, os.strerror(self.then), *([] if what in _UNNAMED else [name]))
        if self.then == "before":
            os._exit(DIED)
        return True

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and arguments[2] & _CHANGES and isinstance(arguments[0], (str, bytes, os.PathLike)):
            self.meet("open", arguments[0])
        elif event in _EVENTS and not (event == "os.mkdir" and os.path.isdir(arguments[0])):
            folder = arguments[-1] if event in ("os.remove", "os.rmdir") else -1
            for path in arguments[: _EVENTS[event]]:
                before = len(self.met)
                self.meet(event.removeprefix("os."), path, folder)
                if len(self.met) > before:
                    break

    @staticmethod
    def _file_of(handle: int) -> str:
        place = f"/proc/self/fd/{handle}"
        return os.readlink(place) if os.path.islink(place) else ""

    def _wrap_os(self, name: str) -> None:
        original = getattr(os, name)

        def counted(file: Any, *rest: Any) -> Any:
            self.meet(name, file if isinstance(file, int) else file.fileno())
            return original(file, *rest)

        setattr(os, name, counted)

    def _wrap_open(self) -> None:
        original = io.open

        def opened(file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
            handle = original(file, mode, *rest, **named)
            return _Written(handle, self, file) if set(mode) & set("wax+") else handle

        builtins.open = io.open = opened  # type: ignore[assignment]
        if hasattr(pathlib, "_NormalAccessor"):  # Python 3.10 keeps a reference
            pathlib._NormalAccessor.open = staticmethod(opened)


class _Written:
    """A file open for writing, with counted write, flush, truncate and close."""

    def __init__(self, file: Any, operations: Operations, path: Any) -> None:
        self._file, self._operations, self._path = file, operations, path

    def write(self, content: Any) -> Any:
        if self._operations.meet("write", self._path, halves=True):
            self._file.write(content[: len(content) // 2])
            self._file.flush()
            os._exit(DIED)
        return self._file.write(content)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._operations.meet("flush", self._path)
        self._file.flush()

    def truncate(self, size: int | None = None) -> Any:
        self._operations.meet("truncate", self._path)
        return self._file.truncate(size)

    def close(self) -> None:
        if not self._file.closed:
            self._file.close()  # it is closed even where that fails
            self._operations.meet("close", self._path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Written:
        return self

    def __exit__(self, *problem: Any) -> None:
        self.close()

    def __iter__(self) -> Any:
        return iter(self._file)
