"""Files in folders, tar and zip archives, read in any order: an archive is indexed once, and read by offset.

Training reads files in an order of its own, and goes on from any step, so an archive must be read at random places. A
tar is a row of 512-byte headers with the content behind each; the index says where. It is made by one pass over the
headers and kept in the cache folder (`store.py`) under path, size and time of change of the archive. A compressed tar
has no places to go to: it is unpacked once, to a plain tar in the cache folder, and its index holds a checksum of each
member, so that what was kept is not trusted blindly. Members of a zip are compressed one by one.

Why not a library: torchvision's readers want archives unpacked; webdataset reads tars from front to back and shuffles
within a buffer, so that an epoch cannot go on from its middle; Hugging Face `datasets` unpacks or copies archives into
files of its own. `tarfile` and `zipfile` find the members here, and reading is a seek.
"""

from __future__ import annotations

import bz2
import contextlib
import copy
import errno
import gzip
import hashlib
import lzma
import os
import stat
import struct
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from cached_transformers.files import write_whole

from .store import Arrays, cache_folder, load_or_build

ARCHIVES = (".tar", ".tar.xz", ".tar.gz", ".tar.bz2", ".tgz", ".zip")
DAMAGE = (
    *(OSError, EOFError, lzma.LZMAError, zlib.error, tarfile.TarError, zipfile.BadZipFile, struct.error, ValueError),
    *(LookupError, ArithmeticError, TypeError, MemoryError, RuntimeError),
)
"""What the standard library raises at a damaged archive or compressed file: encrypted or unknown members, links to
nowhere and in circles, and absurd sizes are among it."""
_OPENERS: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open, ".tgz": gzip.open, ".bz2": bz2.open}


@contextlib.contextmanager
def naming(what: object, kind: str = "archive") -> Iterator[None]:
    """While something is read: damage as a ValueError that names it, and errors of the disk as they are, named too."""
    try:
        yield
    except DAMAGE as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # a seek to nowhere is damage
            error.filename = error.filename or str(what)
            raise
        reason = str(error) or type(error).__name__
        raise ValueError(f"{what} cannot be read: {reason}; the {kind} is damaged, fetch it again") from error


class Listing:
    """All files below a folder, or in an archive, by relative name.

    Args:
        root: the folder or archive.
        open_tars: whether plain tars in a folder count as folders of their name: `a/b.tar` holding `c` becomes `a/b/c`.

    Attributes:
        root: what names are relative to: the folder or archive, or a folder in it.
        archive: the archive; None for a folder.
        folder: where in the archive or folder the names begin, with a slash behind it, or "".
        names: of files, with slashes, sorted; hidden ones are left out.
        folders: of every folder, empty ones included.

    Raises:
        FileNotFoundError: there is no such path.
        ValueError: neither a folder nor an archive, or an archive that is damaged.
    """

    def __init__(self, root: Path, open_tars: bool = False) -> None:
        if not root.exists():
            raise FileNotFoundError(f"{root} does not exist; give the folder or archive as data.path=...")
        self.root, self.folder = root, ""
        self.archive = None if root.is_dir() else root
        self._members: Tar | _Zip | None = None
        self._inner: dict[str, tuple[Tar, int]] = {}
        if root.is_dir():
            names, folders = _walk(root)
            if open_tars:
                names, folders = self._opened(names, folders)
        elif root.name.lower().endswith(ARCHIVES):
            refuse_special(root)
            with naming(root):
                self._members = _Zip(root) if root.name.lower().endswith(".zip") else open_tar(root)
            names, folders = self._members.names, self._members.folders
        else:
            raise ValueError(f"{root} is neither a folder nor an archive ({', '.join(ARCHIVES)})")
        self._place = {name: index for index, name in enumerate(names)}
        self.names = sorted((name for name in self._place if not _hidden(name)), key=lambda name: name.split("/"))
        filled = {name.rpartition("/")[0] for name in self.names}
        every = {parent.as_posix() for folder in filled for parent in PurePosixPath(folder, "_").parents}
        self.folders = (every | {folder for folder in folders if not _hidden(folder)}) - {"", "."}

    def __contains__(self, name: str) -> bool:
        if self.folder + name in self._place:
            return True
        # What a folder's list does not have may still be a file: names with ".." or from the root on.
        return self.archive is None and "/" in name and (self.root / name).is_file()

    def read(self, name: str) -> bytes:
        """Content of a file.

        Raises:
            OSError: it cannot be read. ValueError: it is damaged in its archive.
        """
        if self._members is not None:
            return self._members.read(self._place[self.folder + name])
        if self.folder + name in self._inner:
            tar, place = self._inner[self.folder + name]
            return tar.read(place)
        return read_file(self.root / name)

    def inside(self, folder: str) -> Listing:
        """The files below one of the folders ("" is the root), by their names from there on."""
        if not folder:
            return self
        view, prefix = copy.copy(self), f"{folder}/"
        view.root, view.folder = self.root / folder, self.folder + prefix
        view.names = [name.removeprefix(prefix) for name in self.names if name.startswith(prefix)]
        view.folders = {name.removeprefix(prefix) for name in self.folders if name.startswith(prefix)}
        return view

    def subfolders(self) -> list[str]:
        """Names of the folders directly in the root, sorted."""
        return sorted(name for name in self.folders if "/" not in name)

    def _opened(self, names: list[str], folders: list[str]) -> tuple[list[str], list[str]]:
        """The same lists with the members of every plain tar in the tar's place."""
        found: list[str] = []
        for name in names:
            if not name.endswith(".tar") or _hidden(name):
                found.append(name)
                continue
            tar, stem = Tar(self.root / name), name.removesuffix(".tar")
            folders = [*folders, stem, *(f"{stem}/{inner}" for inner in tar.folders)]
            inside = {f"{stem}/{inner}": (tar, place) for place, inner in enumerate(tar.names)}
            self._inner.update(inside)
            found += inside
        return found, folders


def open_listing(path: str | Path, expected: str) -> Listing:
    """The files of a folder or archive; of the archive in a folder that holds nothing else.

    An archive that has everything in one folder counts as that folder.

    Args:
        expected: what should be there, for the message.

    Raises:
        FileNotFoundError: there is no such path.
        ValueError: see `Listing`.
    """
    root = Path(path).expanduser()
    if not root.exists():
        raise FileNotFoundError(f"{root} does not exist; expected {expected}")
    inside = [file for file in root.iterdir() if not file.name.startswith(".")] if root.is_dir() else []
    alone = len(inside) == 1 and inside[0].is_file() and inside[0].name.lower().endswith(ARCHIVES)
    listing = Listing(inside[0] if alone else root)
    while listing.archive and len(listing.subfolders()) == 1 and all("/" in name for name in listing.names):
        listing = listing.inside(listing.subfolders()[0])
    return listing


def identity(path: Path) -> dict[str, object]:
    """What a file's cached index or unpacked form is kept under."""
    status = refuse_special(path)
    return {"version": 1, "path": str(path.resolve()), "bytes": status.st_size, "changed": status.st_mtime_ns}


def refuse_special(path: Path) -> os.stat_result:
    """Facts of a file (ValueError: it is something else; a pipe would be waited for, and a device never ends)."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is a folder, pipe or device, no file; remove it")
    return status


def read_file(path: Path) -> bytes:
    """A whole file (ValueError: it is something else)."""
    refuse_special(path)
    return path.read_bytes()


def as_text(content: bytes, name: object) -> str:
    """UTF-8 as text (ValueError: it is none; `name` is what the message calls it)."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 (byte {error.start}); convert it, or fetch it again") from None


def read_at(path: Path, offset: int, size: int) -> bytes:
    """`size` bytes of a file from `offset` on (OSError when it has fewer)."""
    with path.open("rb") as file:
        file.seek(offset)
        content = file.read(size)
    if len(content) < size:
        raise OSError(f"{path} ends before byte {offset + size}; it has changed since it was indexed")
    return content


def plain_tar(path: Path, anew: bool = False) -> Path:
    """The tar itself, or what it holds, unpacked to a plain tar in the cache folder.

    Args:
        anew: unpack it even if it was unpacked before.

    Raises:
        OSError: no place to write; the message says how to choose another folder. Damage shows as other errors.
    """
    opener = _OPENERS.get(path.suffix.lower())
    if opener is None:
        return path
    digest = hashlib.sha256(repr(sorted(identity(path).items())).encode()).hexdigest()[:24]
    target = cache_folder() / f"unpacked-{digest}.tar"
    if target.is_file() and not anew:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with opener(path) as packed:
            write_whole(target, iter(lambda: packed.read(1 << 20), b""))
    except OSError as error:
        if error.errno is not None:
            hint = "set CACHED_TRANSFORMERS_CACHE to a folder with room, or unpack the archive and give its folder"
            raise OSError(error.errno, f"{path} could not be unpacked to {target.parent} ({error}); {hint}") from error
        raise
    return target


def open_tar(path: Path) -> Tar:
    """A tar, plain or compressed."""
    return UnpackedTar(path) if path.suffix.lower() in _OPENERS else Tar(path)


class Tar:
    """A plain tar, with its index from the cache folder or made by one pass.

    Attributes:
        names: of regular files, in their order. offsets, sizes: of their contents in bytes. folders: of its folders.

    Raises:
        ValueError: it is no tar, or it ends too early.
    """

    def __init__(self, path: Path) -> None:
        self._take(path, load_or_build("tar-index", identity(path), lambda: _index_arrays(path)))

    def _take(self, path: Path, arrays: Arrays) -> None:
        self.path, self.offsets, self.sizes = path, arrays["offsets"], arrays["sizes"]
        self.names, self.folders = _strings(arrays["names"]), _strings(arrays["folders"])

    def read(self, place: int) -> bytes:
        """Content of the file at this place in `names`."""
        return read_at(self.path, int(self.offsets[place]), int(self.sizes[place]))


class UnpackedTar(Tar):
    """A compressed tar, unpacked in the cache folder; a member that is not as it was unpacked is unpacked again.

    The index is made when the tar is unpacked, and with it a checksum (CRC-32) of each member, which costs a read of
    what was just written. An index that is lost takes the unpacked tar with it: nobody knows whether that is whole.

    Raises:
        OSError: no place to write. Damage of the compressed tar shows as other errors.
    """

    def __init__(self, source: Path) -> None:
        self.source = source
        arrays = load_or_build("unpacked-index", identity(source), self._unpacked)
        self._take(plain_tar(source), arrays)
        self._sums = arrays["sums"]

    def _unpacked(self) -> Arrays:
        self._take(path := plain_tar(self.source, anew=True), arrays := _index_arrays(path))
        sums = [zlib.crc32(super(UnpackedTar, self).read(place)) for place in range(len(self.names))]
        return {**arrays, "sums": np.array(sums, dtype=np.uint32)}

    def read(self, place: int) -> bytes:
        """Content of the file at this place in `names` (ValueError: unpacking again does not mend it)."""
        content = self._whole(place)
        if content is None:
            message = (
                f"{self.path} is damaged (the checksum of {self.names[place]} differs); unpacking {self.source} again"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            with naming(self.source):
                plain_tar(self.source, anew=True)
            content = self._whole(place)
        if content is None:
            raise ValueError(
                f"{self.source}:{self.names[place]} has changed while it was read; fetch the archive again"
            )
        return content

    def _whole(self, place: int) -> bytes | None:
        try:
            content = super().read(place)
        except OSError:  # gone, or cut short
            return None
        return content if zlib.crc32(content) == self._sums[place] else None


class _Zip:
    def __init__(self, path: Path) -> None:
        self.path = path
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
        files = [info for info in infos if not info.is_dir()]
        self.names = [info.filename for info in files]
        self.folders = [info.filename.rstrip("/") for info in infos if info.is_dir()]
        places = [(i.header_offset, i.compress_size, i.compress_type, i.CRC) for i in files]
        self._places = np.array(places, dtype=np.int64).reshape(len(files), 4)

    def read(self, place: int) -> bytes:
        header, size, method, checksum = (int(number) for number in self._places[place])
        try:
            if method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # rare, and found by name: slower
                with zipfile.ZipFile(self.path) as archive:
                    return archive.read(self.names[place])
            # The local header repeats name and extra field, with lengths of its own (PKWARE APPNOTE, 4.3.7).
            name, extra = struct.unpack("<HH", read_at(self.path, header + 26, 4))
            content = read_at(self.path, header + 30 + name + extra, size)
            content = content if method == zipfile.ZIP_STORED else zlib.decompress(content, -15)
            if zlib.crc32(content) != checksum:
                raise zlib.error("its checksum differs")
        except DAMAGE as error:
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # the disk's fault
                raise
            raise ValueError(f"{self.path}:{self.names[place]} is damaged: {error}") from error
        return content


def regular_files(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Members that are files or folders, one after the other, without keeping any: millions do not fit.

    Raises:
        ValueError: a member that is said to be of less than no size, which would lead back to an earlier one, for ever.
    """
    for info in archive:
        if info.size < 0:
            raise ValueError(f"{info.name} is said to have {info.size} bytes")
        if info.isfile() or info.isdir():
            yield info
        archive.members.clear()  # type: ignore[attr-defined]  # tarfile keeps every member it has seen


def _index_arrays(path: Path) -> Arrays:
    names, folders, offsets, sizes = [], [], [], []
    try:
        with tarfile.open(path, "r:") as archive:
            for info in regular_files(archive):
                name = info.name.removeprefix("./").rstrip("/")
                if info.isdir():
                    folders.append(name)
                else:
                    names.append(name)
                    offsets.append(info.offset_data)
                    sizes.append(info.size)
    except DAMAGE as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise ValueError(f"{path} is no tar archive, or damaged: {error}; fetch it again") from error
    length = path.stat().st_size
    if offsets and (end := offsets[-1] + sizes[-1]) > length:  # tarfile takes the end for the end
        raise ValueError(f"{path} ends after {length} bytes, within {names[-1]} (up to {end}); fetch it again")
    numbers = {"offsets": np.array(offsets, dtype=np.int64), "sizes": np.array(sizes, dtype=np.int64)}
    return {**numbers, "names": _joined(names), "folders": _joined(folders)}


def _joined(names: Iterable[str]) -> np.ndarray:
    return np.frombuffer("\0".join(names).encode("utf-8", "surrogateescape"), dtype=np.uint8)


def _strings(joined: np.ndarray) -> list[str]:
    return joined.tobytes().decode("utf-8", "surrogateescape").split("\0") if len(joined) else []


def _walk(root: Path) -> tuple[list[str], list[str]]:
    names, folders = [], []
    for here, below, files in os.walk(root, followlinks=True):
        relative = Path(here).relative_to(root).as_posix()
        prefix = "" if relative == "." else f"{relative}/"
        below[:] = [name for name in below if not _hidden(name)]
        folders += [f"{prefix}{name}" for name in below]
        names += [f"{prefix}{name}" for name in files]
    return names, folders


def _hidden(name: str) -> bool:
    return any(part.startswith(".") or part == "__MACOSX" for part in name.split("/"))
