"""Tar shards in the webdataset layout, read from beginning to end: local files, or what a program writes.

The members of one example stand together and share their name up to the first dot: `0001.jpg`, `0001.cls`. A place in a
shard is the number of examples in front of it: of a file their headers are passed over, of a program what it writes.

A program is started for a shard called `pipe:PROGRAM ARGUMENTS`, without a shell, and only where the environment says
`CACHED_TRANSFORMERS_PROGRAMS=1`, since a recipe of somebody else would name it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Literal, NamedTuple

from cached_lab.data.archives import naming, refuse_special

from .class_folders import is_image
from .image_shards import expanded, find_shards, read_label

PIPE = "pipe:"
ALLOWED = "CACHED_TRANSFORMERS_PROGRAMS"
"""Variable of the environment that lets shards be written by programs."""


class Example(NamedTuple):
    """One image file with its label; `name` is what errors call it."""

    content: bytes
    label: int
    name: str


class TarStreams:
    """The examples of some shards (`data/shard_order.py` deals them).

    Args:
        names: paths, or programs behind "pipe:". label: "cls" or "json:KEY". classes: number of labels.
        skip: whether examples without image or label are passed over, or stop a run.

    Raises:
        ValueError: programs that are not allowed; while reading, a shard that is damaged or cut short, a program that
            fails, an example that is not whole, or a label that is none of the classes.
    """

    def __init__(self, names: Sequence[str], label: str, classes: int, skip: bool) -> None:
        self.names, self.label, self.classes, self.skip = names, label, classes, skip
        programs = [name for name in names if name.startswith(PIPE)]
        if programs and os.environ.get(ALLOWED) != "1":
            raise ValueError(
                f"data.path starts a program ({programs[0]}); if that is what you want, set {ALLOWED}=1 in the "
                "environment, or give local files"
            )

    def read(self, shard: int, place: int | None = None) -> TarReader:
        return TarReader(self, self.names[shard], place or 0)


class TarReader(Iterator[Example]):
    """The examples of one shard from a place on."""

    def __init__(self, shards: TarStreams, name: str, place: int) -> None:
        self._shards, self._name, self._place = shards, name, 0
        self._program: subprocess.Popen[bytes] | None = None
        with naming(name, "shard"):
            self._file = self._opened()
            mode: Literal["r:", "r|"] = "r:" if self._program is None else "r|"
            self._archive = tarfile.open(fileobj=self._file, mode=mode)  # noqa: SIM115  # read on in __next__
            self._coming = _files(self._archive)
            self._next = self._header()
            while self._place < place:
                if self._next is None:
                    raise ValueError(f"it has {self._place} examples, and had {place}")
                self._members(read=False)

    def __next__(self) -> Example:
        while self._next is not None:
            with naming(self._name, "shard"):
                stem, files = self._members(read=True)
            found = self._example(f"{self._name}:{stem}", files)
            if found is not None:
                return found
        raise StopIteration

    def place(self) -> int:
        return self._place

    def _opened(self) -> IO[bytes]:
        if not self._name.startswith(PIPE):
            refuse_special(Path(self._name))
            return open(self._name, "rb")
        words = shlex.split(self._name.removeprefix(PIPE))
        self._program = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert self._program.stdout is not None
        return self._program.stdout

    def _members(self, read: bool) -> tuple[str, dict[str, bytes]]:
        """Pass the members of the next example: its name, and their content by kind where it is asked for."""
        assert self._next is not None
        stem, files = _stem(self._next.name)[0], {}
        while self._next is not None and _stem(self._next.name)[0] == stem:
            kind = _stem(self._next.name)[1]
            if read and (is_image(f"_.{kind}") or kind == self._shards.label.partition(":")[0]):
                files[kind] = self._content(self._next)
            self._next = self._header()
        self._place += 1
        return stem, files

    def _example(self, name: str, files: Mapping[str, bytes]) -> Example | None:
        """What its members make; None where one is missing and that is allowed."""
        wanted, _, key = self._shards.label.partition(":")
        images = [content for kind, content in files.items() if kind != wanted]
        if not images or wanted not in files:
            if self._shards.skip:
                return None
            lacks = f".{wanted} member" if images else "image"
            raise ValueError(f"{name} has no {lacks}; make the shard again, or set data.bad_files=skip or data.label")
        label, most = read_label(files[wanted], key, f"{name}.{wanted}"), self._shards.classes - 1
        if not 0 <= label <= most:
            raise ValueError(f"{name}: label {label} must lie in 0..{most}; set data.classes to their number")
        return Example(images[-1], label, name)

    def _content(self, member: tarfile.TarInfo) -> bytes:
        file = self._archive.extractfile(member)
        content = b"" if file is None else file.read()
        if len(content) < member.size:
            raise ValueError(f"it ends within {member.name}")
        return content

    def _header(self) -> tarfile.TarInfo | None:
        """The next member; None at the end, which is refused where a part of the shard is missing."""
        if (found := next(self._coming, None)) is not None:
            return found
        if self._program is None:
            self._file.seek(self._archive.offset)
            if self._file.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
                raise ValueError("it ends without the mark that ends an archive")
            self._file.close()
            return None
        while self._file.read(1 << 16):
            pass
        if status := self._program.wait():
            raise ValueError(f"the program ended with status {status}")
        return None

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # not opened at all
            self._file.close()
            if self._program is not None and self._program.poll() is None:
                self._program.kill()
                self._program.wait()


def shard_names(path: str | Path) -> list[str]:
    """Shards of a folder or a pattern with {first..last}, of files or of programs.

    Raises:
        FileNotFoundError: files that do not exist.
    """
    text = str(path)
    return expanded(text) if text.startswith(PIPE) else [str(shard) for shard in find_shards(path)]


def _files(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Files in their order, none of which is kept; a damaged header in the middle is no end."""
    for info in archive:
        archive.members.clear()  # type: ignore[attr-defined]  # tarfile keeps every member it has seen
        if info.size < 0:
            raise ValueError(f"{info.name} is said to have {info.size} bytes")
        if info.isfile():
            yield info


def _stem(name: str) -> tuple[str, str]:
    """The name of an example, and what a member is of it."""
    folder, _, file = name.rpartition("/")
    stem, _, kind = file.partition(".")
    return f"{folder}/{stem}".lstrip("/"), kind
