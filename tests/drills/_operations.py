"""Ends this process at one file operation below a folder: before it, or inside it, half of a write being done.

What is counted: opening to write, writing, truncating, forcing to disk, renaming, making and removing files and
folders, and the files that safetensors writes by itself. Between two operations nothing changes on disk, so that "after
one" is "before the next". Their order is a function of what is done, so a first pass tells what there is.
"""

from __future__ import annotations

import builtins
import io
import os
import pathlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

DIED = 77
"""Exit status of a process that was ended here."""
_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EVENTS = {"os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.mkdir": 1, "os.truncate": 1, "os.link": 2}
"""Audit events of one operation each, and how many paths they tell."""


class Operation(NamedTuple):
    """One of them: `halves` says whether a process can end inside it."""

    what: str
    halves: bool


class Operations:
    """Counts the operations below `folder` from now on, in this process, for good.

    Args:
        number: the process ends at this one, from 0; None only counts. inside: in its midst, where it has one.
    """

    def __init__(self, folder: Path, number: int | None = None, inside: bool = False) -> None:
        self.folder, self.number, self.inside = os.path.realpath(folder), number, inside
        self.met: list[Operation] = []
        sys.addaudithook(self._audit)
        self._wrap_open()
        self._wrap(os, "fsync", lambda file: self._file_of(file))
        self._wrap_save_file()

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and arguments[2] & _CHANGES and isinstance(arguments[0], (str, bytes, os.PathLike)):
            self._meet("open", arguments[0])
        elif event in _EVENTS:
            folder = arguments[-1] if event in ("os.remove", "os.rmdir") else -1
            for path in arguments[: _EVENTS[event]]:
                if self._meet(event.removeprefix("os."), path, folder):
                    break

    def _meet(self, what: str, path: Any, folder: int = -1, halves: bool = False) -> bool:
        """Count an operation below the folder, and end here where this is the place; whether it was one."""
        name = os.fsdecode(path) if not isinstance(path, int) else self._file_of(path)
        if folder not in (-1, None):
            name = os.path.join(self._file_of(folder), name)
        name = os.path.abspath(name)
        if not f"{name}/".startswith(f"{self.folder}/"):
            return False
        self.met.append(Operation(f"{what} {name[len(self.folder) + 1 :]}", halves))
        if len(self.met) - 1 == self.number and not self.inside:
            os._exit(DIED)
        return True

    def _in_the_midst(self) -> bool:
        return self.inside and len(self.met) - 1 == self.number

    @staticmethod
    def _file_of(file: Any) -> str:
        return os.readlink(f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}")

    def _wrap(self, module: Any, name: str, path: Callable[[Any], str]) -> None:
        original = getattr(module, name)

        def counted(first: Any, *rest: Any, **named: Any) -> Any:
            self._meet(name, path(first))
            return original(first, *rest, **named)

        setattr(module, name, counted)

    def _wrap_open(self) -> None:
        original = io.open

        def opened(file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
            handle = original(file, mode, *rest, **named)
            return _Written(handle, self, file) if set(mode) & set("wax+") else handle

        builtins.open = io.open = opened  # type: ignore[assignment]
        if hasattr(pathlib, "_NormalAccessor"):  # Python 3.10 keeps a reference
            pathlib._NormalAccessor.open = staticmethod(opened)

    def _wrap_save_file(self) -> None:
        import safetensors.torch

        from cached_transformers import state

        original = safetensors.torch.save_file

        def save_file(tensors: Any, path: Any, *rest: Any) -> None:
            below = self._meet("save_file", path, halves=True)
            original(tensors, path, *rest)
            if below and self._in_the_midst():
                os.truncate(path, os.path.getsize(path) // 2)
                os._exit(DIED)

        safetensors.torch.save_file = save_file
        if hasattr(state, "save_file"):
            state.save_file = save_file


class _Written:
    """A file opened to write, which counts each write; all else is the file's own."""

    def __init__(self, file: Any, operations: Operations, path: Any) -> None:
        self._file, self._operations, self._path = file, operations, path

    def write(self, content: Any) -> Any:
        if self._operations._meet("write", self._path, halves=True) and self._operations._in_the_midst():
            self._file.write(content[: len(content) // 2])
            self._file.flush()
            os._exit(DIED)
        return self._file.write(content)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def truncate(self, size: int | None = None) -> Any:
        self._operations._meet("truncate", self._path)
        return self._file.truncate(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Written:
        self._file.__enter__()
        return self

    def __exit__(self, *problem: Any) -> Any:
        return self._file.__exit__(*problem)

    def __iter__(self) -> Any:
        return iter(self._file)
