"""Where annotations and images of a COCO-format data set lie: folders or zip archives, and pixels from their bytes."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cached_transformers.data.decoding import BadFile, open_picture


class Files(Protocol):
    """Image files by the names that the annotations give."""

    def __contains__(self, name: object) -> bool: ...

    def read(self, name: str) -> bytes:
        """The bytes of one file (KeyError or OSError when there is none)."""
        ...

    def label(self, name: str) -> str:
        """The file in words, for messages."""
        ...


class FolderFiles:
    """Files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._names: set[str] | None = None

    def __contains__(self, name: object) -> bool:
        if self._names is None:  # one listing instead of a question per image
            self._names = {entry.name for entry in os.scandir(self.folder)}
        text = str(name)
        return text in self._names if "/" not in text else (self.folder / text).is_file()

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def label(self, name: str) -> str:
        return str(self.folder / name)


class ZipFiles:
    """Files of a zip archive, below `prefix`; each process opens it for itself."""

    def __init__(self, path: Path, prefix: str) -> None:
        self.path, self.prefix = path, prefix
        with zipfile.ZipFile(path) as archive:
            self._members = frozenset(archive.namelist())
        self._opened: tuple[int, zipfile.ZipFile] | None = None

    def __contains__(self, name: object) -> bool:
        return f"{self.prefix}{name}" in self._members

    def read(self, name: str) -> bytes:
        # A handle that two processes share has one place in the file for both.
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = (os.getpid(), zipfile.ZipFile(self.path))
        return self._opened[1].read(f"{self.prefix}{name}")

    def label(self, name: str) -> str:
        return f"{self.path}:{self.prefix}{name}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}


def read_annotations(root: Path, name: str) -> tuple[dict[str, Any], str]:
    """The annotations called `name` ("train2017"), and where they were found.

    Looked for below `root`: annotations/instances_NAME.json, instances_NAME.json, annotations/NAME.json, NAME.json and
    NAME/_annotations.coco.json; then members of these names in the zip archives there (or in `root` itself, when that
    is one).

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not JSON, or not the annotations of a detection data set.
    """
    if not root.exists():
        raise FileNotFoundError(f"{root} does not exist; expected a folder or zip archive with COCO annotations")
    wanted = [f"annotations/instances_{name}.json", f"instances_{name}.json", f"annotations/{name}.json"]
    wanted += [f"{name}.json", f"{name}/_annotations.coco.json"]
    for relative in wanted:
        if (root / relative).is_file():
            return _parsed((root / relative).read_bytes(), str(root / relative)), str(root / relative)
    for path in _archives(root):
        with _open(path) as archive:
            members = set(archive.namelist())
            for relative in wanted:
                if relative in members:
                    label = f"{path}:{relative}"
                    return _parsed(archive.read(relative), label), label
    raise FileNotFoundError(
        f"{root} holds no annotations for {name!r}: looked for {', '.join(wanted)}, also in its zip archives; "
        "set data.train, data.validation and data.test to the names that the files have"
    )


def find_images(root: Path, name: str, examples: Iterable[str]) -> Files:
    """The files of the images called `name`: the first folder or archive that holds at least one of `examples`.

    Looked for: the folders NAME, images/NAME, images and `root` itself, then the same places in zip archives.

    Raises:
        FileNotFoundError: there is none.
    """
    examples = list(examples)
    folders = [root / name, root / "images" / name, root / "images", root]
    for folder in folders:
        if folder.is_dir():
            files = FolderFiles(folder)
            if any(example in files for example in examples):
                return files
    for path in _archives(root):
        for prefix in (f"{name}/", f"images/{name}/", "images/", ""):
            _open(path).close()
            members = ZipFiles(path, prefix)
            if any(example in members for example in examples):
                return members
    raise FileNotFoundError(
        f"{root} holds none of the {len(examples)} images of {name!r} (such as {examples[0] if examples else 'none'}): "
        f"expected them in {name}/, images/{name}/, images/ or beside the annotations, in folders or zip archives"
    )


def decode_rgb(content: bytes, label: str, size: tuple[int, int] | None = None) -> np.ndarray:
    """Pixels uint8 (height, width, 3) of an image file of any kind that `open_picture` takes.

    With `size` (height, width) the image is taken as stored, or upright by its EXIF entry if only then it has that
    size; without, upright.

    Raises:
        BadFile: it cannot be decoded, or has another size.
    """
    picture = open_picture(content, label, stored_size=None if size is None else (size[1], size[0]))
    if size is not None and picture.size != (size[1], size[0]):
        wide, high = picture.size
        raise BadFile(label, f"it has {wide} x {high} pixels, its annotations say {size[1]} x {size[0]}")
    return np.array(picture)


def _archives(root: Path) -> list[Path]:
    return [root] if root.is_file() else sorted(root.glob("*.zip"))


def _open(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError) as error:
        raise ValueError(f"{path} cannot be read as a zip archive: {error}; fetch it again") from error


def _parsed(content: bytes, label: str) -> dict[str, Any]:
    try:
        tree = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{label} is not JSON: {error}; is it complete?") from error
    if not isinstance(tree, dict):
        raise ValueError(f"{label} must hold a JSON object, not {type(tree).__name__}")
    missing = [key for key in ("images", "annotations", "categories") if not isinstance(tree.get(key), list)]
    if missing:
        raise ValueError(f"{label} has no list {', '.join(missing)}: it is not the annotations of a detection data set")
    return tree
