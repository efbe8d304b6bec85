"""Files in folders, tar and zip archives, read in any order: an archive is indexed once, and read by offset.

Training reads files in an order of its own, and goes on from any step, so an archive must be read at random places. A
tar is a row of 512-byte headers with the content behind each; the index says where. It is made by one pass over the
headers and kept in the cache folder (`store.py`) under path, size and time of change of the archive. A compressed tar
has no places to go to: it is unpacked once, to a plain tar in the cache folder. Members of a zip are compressed one by
one.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import os
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cached_transformers.data.store import Arrays, cache_folder, load_or_build

_DECOMPRESS: dict[str, Callable[..., Any]] = {
    ".xz": lzma.open,
    ".gz": gzip.open,
    ".tgz": gzip.open,
    ".bz2": bz2.open,
}
ARCHIVES = (".tar", ".tar.xz", ".tar.gz", ".tar.bz2", ".tgz", ".zip")
_DAMAGE = (OSError, EOFError, lzma.LZMAError, zlib.error, tarfile.TarError, zipfile.BadZipFile, struct.error)


def is_archive(path: Path) -> bool:
    """Whether the name is that of an archive which `Listing` reads."""
    return path.name.lower().endswith(ARCHIVES)


def only_archive(path: Path) -> Path:
    """The archive in a folder that holds nothing else; otherwise the path itself.

    Raises:
        FileNotFoundError: there is no such path.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; give the folder or archive as data.path=...")
    inside = [file for file in path.iterdir() if not file.name.startswith(".")] if path.is_dir() else []
    return inside[0] if len(inside) == 1 and is_archive(inside[0]) else path


class Listing:
    """All files below a folder, or in an archive, by relative name.

    Args:
        root: the folder or archive.
        open_tars: whether plain tars in a folder count as folders of their name: `a/b.tar` holding `c` becomes `a/b/c`.

    Attributes:
        names: of files, with slashes, sorted; hidden ones are left out.
        folders: of every folder, empty ones included.

    Raises:
        FileNotFoundError: there is no such path.
        ValueError: neither a folder nor an archive, or an archive that is damaged.
    """

    def __init__(self, root: Path, open_tars: bool = False) -> None:
        if not root.exists():
            raise FileNotFoundError(f"{root} does not exist; give the folder or archive as data.path=...")
        self.root = root
        self._archive: _Tar | _Zip | None = None
        self._inner: dict[str, tuple[_Tar, int]] = {}
        if root.is_dir():
            names, folders = _walk(root)
            if open_tars:
                names, folders = self._opened(names, folders)
        elif is_archive(root):
            try:
                self._archive = _Zip(root) if root.name.lower().endswith(".zip") else _Tar(plain_tar(root))
            except _DAMAGE as error:
                raise ValueError(f"{root} cannot be read: {error}; the archive is damaged, fetch it again") from error
            names, folders = self._archive.names, self._archive.folders
        else:
            raise ValueError(f"{root} is neither a folder nor an archive ({', '.join(ARCHIVES)})")
        self._place = {name: index for index, name in enumerate(names) if not _hidden(name)}
        self.names = sorted(self._place, key=lambda name: name.split("/"))
        parents = {parent for name in self.names for parent in _parents(name)}
        self.folders = parents | {folder for folder in folders if folder and not _hidden(folder)}

    def read(self, name: str) -> bytes:
        """Content of a file.

        Raises:
            OSError: it cannot be read. ValueError: it is damaged in its archive.
        """
        if name in self._inner:
            tar, place = self._inner[name]
            return tar.read(place)
        if self._archive is None:
            return (self.root / name).read_bytes()
        return self._archive.read(self._place[name])

    def _opened(self, names: list[str], folders: list[str]) -> tuple[list[str], list[str]]:
        """The same lists with the members of every plain tar in the tar's place."""
        found: list[str] = []
        for name in names:
            if not name.endswith(".tar") or _hidden(name):
                found.append(name)
                continue
            tar, stem = _Tar(self.root / name), name.removesuffix(".tar")
            folders = [*folders, stem, *(f"{stem}/{inner}" for inner in tar.folders)]
            for place, inner in enumerate(tar.names):
                self._inner[f"{stem}/{inner}"] = (tar, place)
                found.append(f"{stem}/{inner}")
        return found, folders

    def subfolders(self, folder: str = "") -> list[str]:
        """Names of the folders directly in `folder` ("" is the root), sorted."""
        prefix = f"{folder}/" if folder else ""
        inside = (f[len(prefix) :] for f in self.folders if f.startswith(prefix))
        return sorted(name for name in inside if name and "/" not in name)

    def below(self, folder: str) -> list[str]:
        """Names of all files below a folder."""
        prefix = f"{folder}/" if folder else ""
        return [name for name in self.names if name.startswith(prefix)]

    def top(self) -> str:
        """The folder in which an archive holds everything, "" if there is none (as with folders)."""
        found = ""
        while self._archive is not None:
            inside = self.subfolders(found)
            if len(inside) != 1 or any("/" not in n[len(found) :].lstrip("/") for n in self.below(found)):
                break
            found = f"{found}/{inside[0]}".lstrip("/")
        return found


@dataclass(frozen=True)
class TarIndex:
    """Where the files of one plain tar lie.

    Attributes:
        names: of regular files, in their order. offsets, sizes: of their contents in bytes. folders: of its folders.
    """

    names: list[str]
    offsets: np.ndarray
    sizes: np.ndarray
    folders: list[str]


def tar_index(path: Path) -> TarIndex:
    """The index of a plain tar, from the cache folder or made by one pass.

    Raises:
        ValueError: it is no tar, or it ends too early.
    """
    arrays = load_or_build("tar-index", identity(path), lambda: _index_arrays(path))
    return TarIndex(_strings(arrays["names"]), arrays["offsets"], arrays["sizes"], _strings(arrays["folders"]))


def identity(path: Path) -> dict[str, object]:
    """What a file's cached index or unpacked form is kept under."""
    status = path.stat()
    return {"version": 1, "path": str(path.resolve()), "bytes": status.st_size, "changed": status.st_mtime_ns}


def read_at(path: Path, offset: int, size: int) -> bytes:
    """`size` bytes of a file from `offset` on (OSError when it has fewer)."""
    with path.open("rb") as file:
        file.seek(offset)
        content = file.read(size)
    if len(content) < size:
        raise OSError(f"{path} ends before byte {offset + size}; it has changed since it was indexed")
    return content


def plain_tar(path: Path) -> Path:
    """The tar itself, or what it holds, unpacked to a plain tar in the cache folder.

    Raises:
        OSError: no place to write; the message says how to choose another folder. Damage shows as other errors.
    """
    opener = _DECOMPRESS.get(path.suffix.lower())
    if opener is None:
        return path
    digest = hashlib.sha256(repr(sorted(identity(path).items())).encode()).hexdigest()[:24]
    target = cache_folder() / f"unpacked-{digest}.tar"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with opener(path) as packed, temporary.open("wb") as out:
            shutil.copyfileobj(packed, out, 1 << 20)
        os.replace(temporary, target)
    except OSError as error:
        if error.errno is not None:
            hint = "set CACHED_TRANSFORMERS_CACHE to a folder with room, or unpack the archive and give its folder"
            raise OSError(error.errno, f"{path} could not be unpacked to {target.parent} ({error}); {hint}") from error
        raise
    finally:
        temporary.unlink(missing_ok=True)
    return target


class _Tar:
    def __init__(self, path: Path) -> None:
        index = tar_index(path)
        self.path, self.names, self.folders = path, index.names, index.folders
        self._offsets, self._sizes = index.offsets, index.sizes

    def read(self, place: int) -> bytes:
        return read_at(self.path, int(self._offsets[place]), int(self._sizes[place]))


class _Zip:
    def __init__(self, path: Path) -> None:
        self.path = path
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
        files = [info for info in infos if not info.is_dir()]
        self.names = [info.filename for info in files]
        self.folders = [info.filename.rstrip("/") for info in infos if info.is_dir()]
        self._places = np.array([(i.header_offset, i.compress_size, i.compress_type) for i in files], dtype=np.int64)
        self._places = self._places.reshape(len(files), 3)
        odd = {i.compress_type for i in files} - {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
        if odd:
            raise ValueError(f"{path} is compressed in a way that is not read here (methods {sorted(odd)}); unpack it")

    def read(self, place: int) -> bytes:
        header, size, method = (int(number) for number in self._places[place])
        # The local header repeats name and extra field, with lengths of its own (PKWARE APPNOTE, 4.3.7).
        name, extra = struct.unpack("<HH", read_at(self.path, header + 26, 4))
        content = read_at(self.path, header + 30 + name + extra, size)
        try:
            return content if method == zipfile.ZIP_STORED else zlib.decompress(content, -15)
        except zlib.error as error:
            raise ValueError(f"{self.path}:{self.names[place]} is damaged: {error}") from error


def _index_arrays(path: Path) -> Arrays:
    names, folders, offsets, sizes = [], [], [], []
    try:
        with tarfile.open(path, "r:") as archive:
            for info in archive:
                name = info.name.removeprefix("./").rstrip("/")
                if info.isdir():
                    folders.append(name)
                elif info.isfile():
                    names.append(name)
                    offsets.append(info.offset_data)
                    sizes.append(info.size)
                archive.members.clear()  # type: ignore[attr-defined]  # tarfile keeps every member it has seen; millions do not fit
    except tarfile.TarError as error:
        raise ValueError(f"{path} is no tar archive, or damaged: {error}; fetch it again") from error
    _whole(path, offsets, sizes, names)
    numbers = {"offsets": np.array(offsets, dtype=np.int64), "sizes": np.array(sizes, dtype=np.int64)}
    return {**numbers, "names": _joined(names), "folders": _joined(folders)}


def _whole(path: Path, offsets: list[int], sizes: list[int], names: list[str]) -> None:
    """Refuse a tar that was cut short: tarfile takes the end for the end."""
    length = path.stat().st_size
    if offsets and offsets[-1] + sizes[-1] > length:
        end = offsets[-1] + sizes[-1]
        raise ValueError(f"{path} ends after {length} bytes, within {names[-1]} (up to {end}); fetch it again")


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


def _parents(name: str) -> list[str]:
    parts = name.split("/")[:-1]
    return ["/".join(parts[: depth + 1]) for depth in range(len(parts))]
