"""Files of folders, tars and zips by relative name, read in any order.

Training reads files in its own order and resumes from any step, so an archive must be read at random places. A tar is
indexed once, by one pass over its headers; the index is cached (`store.py`) under the archive's path, size and
modification time. A compressed tar is unpacked once, to a plain tar in the cache folder.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import copy
import errno
import gzip
import hashlib
import io
import lzma
import os
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import IO

import numpy as np

from cached_transformers.files import write_whole

from .store import Arrays, cache_folder, load_or_build

ARCHIVES = (".tar", ".tar.xz", ".tar.gz", ".tar.bz2", ".tgz", ".zip")
DAMAGE = (
    *(OSError, EOFError, lzma.LZMAError, zlib.error, tarfile.TarError, zipfile.BadZipFile, struct.error, ValueError),
    *(LookupError, ArithmeticError, TypeError, MemoryError, RuntimeError),
)
"""Errors of the standard library for damaged or encrypted archives, circular links and absurd sizes."""
OPENERS: dict[str, Callable[..., IO[bytes]]] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}  # type: ignore[dict-item]
_TAR_OPENERS: dict[str, Callable[..., IO[bytes]]] = {**OPENERS, ".tgz": gzip.open}  # type: ignore[dict-item]
UNPACKED = "CACHED_TRANSFORMERS_UNPACKED_GIB"
"""Environment variable: GiB that a file may have once it is unpacked, 8 by default."""


class TooLarge(ValueError):
    """A file that unpacks to more than the bound."""


def bounded(file: IO[bytes], name: object) -> Iterator[bytes]:
    """Yield the pieces of an unpacked file (TooLarge: it exceeds the bound)."""
    text, size = os.environ.get(UNPACKED, "8"), 0
    if not text.isdecimal():
        raise TooLarge(f"{UNPACKED}={text!r} must be a whole number of GiB; correct or unset it")
    for piece in iter(lambda: file.read(1 << 20), b""):
        size += len(piece)
        if size > int(text) << 30:
            raise TooLarge(f"{name} unpacks to more than {text} GiB; if that is right, set {UNPACKED} to more")
        yield piece


def unpacked(content: bytes, name: object, suffix: str) -> bytes:
    """Return the content of a file, decompressed if its suffix says so (TooLarge: it exceeds the bound)."""
    opener = OPENERS.get(suffix)
    return content if opener is None else b"".join(bounded(opener(io.BytesIO(content)), name))


@contextlib.contextmanager
def naming(what: object, kind: str = "archive") -> Iterator[None]:
    """Turn damage into a ValueError that names `what`; errors of the disk pass through, with the name."""
    try:
        yield
    except TooLarge:
        raise
    except DAMAGE as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # EINVAL: a seek outside the file
            error.filename = error.filename or str(what)
            raise
        reason = str(error) or type(error).__name__
        raise ValueError(f"{what} cannot be read: {reason}; the {kind} is damaged, fetch it again") from error


class Listing:
    """All files in a folder or archive, by relative name.

    Args:
        root: the folder or archive.
        open_tars: treat plain tars in a folder as folders: `a/b.tar` holding `c` becomes `a/b/c`.

    Attributes:
        archive: the archive; None for a folder.
        names: sorted file names, with slashes, without hidden files. folders: names of folders; outside archives also
            of empty ones.

    Raises:
        FileNotFoundError: the path does not exist.
        ValueError: neither a folder nor an archive, or a damaged archive.
    """

    def __init__(self, root: Path, open_tars: bool = False) -> None:
        if not root.exists():
            raise FileNotFoundError(f"{root} does not exist; give the folder or archive as data.path=...")
        self.root, self.folder = root, ""
        self.archive = None if root.is_dir() else root
        self._sources: dict[str, tuple[Tar | _Zip | None, int]] = {}
        folders: list[str] = []
        if root.is_dir():
            for here, below, files in os.walk(root, followlinks=True):
                relative = Path(here).relative_to(root).as_posix()
                prefix = "" if relative == "." else f"{relative}/"
                below[:] = [name for name in below if not _hidden(name)]
                folders += [f"{prefix}{name}" for name in below]
                for name in (f"{prefix}{file}" for file in files):
                    if open_tars and name.endswith(".tar") and not _hidden(name):
                        folders.append(name.removesuffix(".tar"))
                        self._add(Tar(root / name), f"{folders[-1]}/")
                    else:
                        self._sources[name] = (None, 0)
        elif root.name.lower().endswith(ARCHIVES):
            self._add(_Zip(root) if root.suffix.lower() == ".zip" else Tar(root))
        else:
            raise ValueError(f"{root} is neither a folder nor an archive ({', '.join(ARCHIVES)})")
        self.names = sorted((name for name in self._sources if not _hidden(name)), key=lambda name: name.split("/"))
        filled = {name.rpartition("/")[0] for name in self.names}
        every = {parent.as_posix() for folder in filled for parent in PurePosixPath(folder, "_").parents}
        self.folders = (every | {folder for folder in folders if not _hidden(folder)}) - {"", "."}

    def _add(self, archive: Tar | _Zip, prefix: str = "") -> None:
        self._sources |= {f"{prefix}{name}": (archive, place) for place, name in enumerate(archive.names)}

    def __contains__(self, name: str) -> bool:
        return self.folder + name in self._sources

    def read(self, name: str) -> bytes:
        """Return the content of a file (OSError: the file cannot be read; ValueError: it is damaged in its archive)."""
        source, place = self._sources[self.folder + name]
        return read_file(self.root / name) if source is None else source.read(place)

    def inside(self, folder: str) -> Listing:
        """Return the files below a folder ("" is the root), with names relative to it."""
        if not folder:
            return self
        view, prefix = copy.copy(self), f"{folder}/"
        view.root, view.folder = self.root / folder, self.folder + prefix
        view.names = [name.removeprefix(prefix) for name in self.names if name.startswith(prefix)]
        view.folders = {name.removeprefix(prefix) for name in self.folders if name.startswith(prefix)}
        return view

    def subfolders(self) -> list[str]:
        """Sorted names of the folders directly in the root."""
        return sorted(name for name in self.folders if "/" not in name)


def open_listing(path: str | Path, open_tars: bool = False) -> Listing:
    """List a folder or archive, or the only archive in a folder (raises: see `Listing`).

    An archive with everything in one folder counts as that folder.
    """
    listing = Listing(Path(path).expanduser(), open_tars)
    if not listing.archive and len(listing.names) == 1 and listing.names[0].endswith(ARCHIVES):
        listing = Listing(listing.root / listing.names[0])
    packed = listing.archive or open_tars
    while packed and len(listing.subfolders()) == 1 and all("/" in name for name in listing.names):
        listing = listing.inside(listing.subfolders()[0])
    return listing


def identity(path: Path) -> dict[str, object]:
    """Cache key of the index or unpacked form of a file."""
    status = refuse_special(path)
    return {"version": 1, "path": str(path.resolve()), "bytes": status.st_size, "changed": status.st_mtime_ns}


def refuse_special(path: Path) -> os.stat_result:
    """Return a file's status; raise ValueError for a pipe or device, which would block or never end."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is a folder, pipe or device, no file; remove it")
    return status


def read_file(path: Path) -> bytes:
    """Return a whole file (ValueError: it is a pipe or device)."""
    refuse_special(path)
    return path.read_bytes()


def refuse_utf16(content: bytes, name: object) -> None:
    """Refuse a text that begins with the mark of UTF-16 (ValueError)."""
    if content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise ValueError(f"{name} is UTF-16, not UTF-8; convert it, e.g. with iconv -f utf-16 -t utf-8")


def as_text(content: bytes, name: object, way: str = "fetch it again") -> str:
    """Decode UTF-8 (ValueError otherwise, with `name` and a way out in the message)."""
    refuse_utf16(content, name)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 (byte {error.start}); convert it, or {way}") from None


def read_at(path: Path, offset: int, size: int) -> bytes:
    """Return `size` bytes of a file from `offset` on (OSError: the file is shorter)."""
    with path.open("rb") as file:
        file.seek(offset)
        content = file.read(size)
    if len(content) < size:
        raise OSError(f"{path} ends before byte {offset + size}; it has changed since it was indexed")
    return content


def plain_tar(path: Path) -> Path:
    """Unpack a compressed tar to a plain tar in the cache folder, once; a plain tar is returned as it is.

    Raises:
        OSError: the cache folder cannot be written. Damage raises other errors.
    """
    opener = _TAR_OPENERS.get(path.suffix.lower())
    if opener is None:
        return path
    digest = hashlib.sha256(repr(sorted(identity(path).items())).encode()).hexdigest()[:24]
    target = cache_folder() / f"unpacked-{digest}.tar"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with opener(path) as packed:
            write_whole(target, bounded(packed, path))
    return target


class Tar:
    """A tar with its index, cached or made by one pass.

    Attributes:
        path: the plain tar. names: of regular files, in order.
        offsets, sizes: of the contents of the files in bytes.

    Raises:
        OSError: a compressed tar, and the cache folder cannot be written.
        ValueError: not a tar, or a damaged one.
    """

    def __init__(self, path: Path) -> None:
        with naming(path):
            self.path = plain_tar(path)
            arrays = load_or_build("tar-index", identity(self.path), lambda: _index_arrays(self.path))
        self.offsets, self.sizes = arrays["offsets"], arrays["sizes"]
        names = arrays["names"].tobytes().decode("utf-8", "surrogateescape")
        self.names = names.split("\0") if names else []

    def read(self, place: int) -> bytes:
        """Return the content of the file at this place in `names`."""
        return read_at(self.path, int(self.offsets[place]), int(self.sizes[place]))


class _Zip:
    def __init__(self, path: Path) -> None:
        self.path, self._changed = path, refuse_special(path).st_mtime_ns
        with naming(path):
            listed = _open_zip(path, self._changed, os.getpid()).infolist()
            self._files = [info for info in listed if not info.is_dir()]
        self.names = [info.filename for info in self._files]

    def read(self, place: int) -> bytes:
        name = f"{self.path}:{self.names[place]}"
        with naming(name, "member"):
            archive = _open_zip(self.path, self._changed, os.getpid())
            with archive.open(self._files[place]) as member:
                return b"".join(bounded(member, name))


@lru_cache(maxsize=8)
def _open_zip(path: Path, changed: int, process: int) -> zipfile.ZipFile:
    """Open a zip once per process: a forked one would share the position in the file."""
    return zipfile.ZipFile(path)


def _index_arrays(path: Path) -> Arrays:
    names, offsets, sizes = [], [], []
    with tarfile.open(path, "r:") as archive:
        for info in archive:
            name = info.name.removeprefix("./").rstrip("/")
            if info.size < 0:  # it would lead back to an earlier member
                raise ValueError(f"{name} is said to have {info.size} bytes")
            if info.isfile():
                names.append(name)
                offsets.append(info.offset_data)
                sizes.append(info.size)
            archive.members.clear()  # type: ignore[attr-defined]  # tarfile keeps every member it has seen
    length = path.stat().st_size
    if offsets and (end := offsets[-1] + sizes[-1]) > length:  # tarfile does not notice a truncated last member
        raise ValueError(f"{path} ends after {length} bytes, within {names[-1]} (up to {end})")
    joined = np.frombuffer("\0".join(names).encode("utf-8", "surrogateescape"), dtype=np.uint8)
    return {"offsets": np.array(offsets, np.int64), "sizes": np.array(sizes, np.int64), "names": joined}


def _hidden(name: str) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))
