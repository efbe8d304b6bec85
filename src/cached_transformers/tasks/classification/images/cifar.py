"""CIFAR-10 and CIFAR-100 ("cifar10", "cifar100"): 32 x 32 colour images of ten and a hundred classes.

Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009). A binary record is one byte of label
(CIFAR-100: coarse label, then fine label) and 3,072 bytes of pixels: red, green and blue plane, each row by row. Files
may be xz-compressed, and folders may be archives. The pickled version for Python is not read: unpickling runs whatever
code the file holds. The same images as PNG or JPEG files, in folders train/<class>/ and test/<class>/, are read too.
"""

from __future__ import annotations

import lzma
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cached_transformers.data.base import check_fraction, check_split, items_of_split
from cached_transformers.data.decoding import open_picture
from cached_transformers.data.store import load_or_build
from cached_transformers.extras import require
from cached_transformers.registry import DATASETS

from .augmentation import central_square
from .base import StoredImages
from .image_folder import labelled
from .packed import Listing, identity, only_archive

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PIXEL_BYTES = 3 * 32 * 32
RECORD_BYTES = 1 + PIXEL_BYTES


class _Kind(NamedTuple):
    """One of the two data sets: its classes, statistics of its 50,000 training images, and files."""

    name: str
    title: str
    classes: int
    label_bytes: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    files: Mapping[str, str]
    expected: Mapping[str, str]
    pickled: str


_TEN = _Kind(
    "cifar10",
    "CIFAR-10",
    10,
    1,
    (0.4914, 0.4822, 0.4465),
    (0.2470, 0.2435, 0.2616),
    {"train": r"data_batch_\d+\.bin(\.xz)?", "test": r"test_batch\.bin(\.xz)?"},
    {"train": "data_batch_1.bin ... data_batch_5.bin", "test": "test_batch.bin"},
    "data_batch_1",
)
_HUNDRED = _Kind(
    "cifar100",
    "CIFAR-100",
    100,
    2,
    (0.5071, 0.4865, 0.4409),
    (0.2673, 0.2564, 0.2762),
    {"train": r"train\.bin(\.xz)?", "test": r"test\.bin(\.xz)?"},
    {"train": "train.bin", "test": "test.bin"},
    "train",
)


class _CIFAR(StoredImages):
    """What the two have in common."""

    kind: ClassVar[_Kind]

    def __init__(
        self,
        split: str,
        *,
        path: str | Path,
        augment: bool = True,
        augmentation: Mapping[str, Any] | None = None,
        validation_fraction: float = 0.1,
        seed: int = 0,
    ) -> None:
        check_fraction("validation_fraction", validation_fraction)
        kind, side = self.kind, "test" if check_split(split) == "test" else "train"
        images, labels, names = _read_side(Path(path).expanduser(), kind, side)
        if side == "train":
            chosen = items_of_split(path, labels, {"validation": validation_fraction}, seed, split)
            images, labels = images[chosen], labels[chosen]
        super().__init__(
            kind.name,
            split,
            images,
            labels,
            class_names=names,
            mean=kind.mean,
            std=kind.std,
            augment=augment,
            augmentation=augmentation,
        )


@DATASETS.register("cifar10")
class CIFAR10(_CIFAR):
    """Classify CIFAR-10 images from the binary batches (`.bin` or `.bin.xz`), all of them, or from PNG or JPEG files.

    The validation split is dealt from the training batches, with equal shares of every class.

    Args:
        split: "train", "validation" or "test".
        path: folder or archive with `data_batch_*.bin` and `test_batch.bin`, or with train/<class>/ and test/<class>/,
            which are decoded once and kept in the cache folder.
        augment: pad training images by 4 pixels, cut out 32 x 32 and mirror, at random.
        augmentation: options of `Augmentation`, in place of that.
        validation_fraction: share of the training batches held out.
        seed: decides which images are held out; training seeds are another matter.

    Raises:
        FileNotFoundError: no such folder, or it lacks the batches (named) of the split.
        ValueError: a damaged batch or file (named), or a share that leaves the split empty.
    """

    kind = _TEN


@DATASETS.register("cifar100")
class CIFAR100(_CIFAR):
    """Classify CIFAR-100 images by their hundred fine classes, from the binary files or from PNG or JPEG files.

    The validation split is dealt from `train.bin`, with equal shares of every class.

    Args:
        split: "train", "validation" or "test".
        path: folder or archive with `train.bin` and `test.bin` (or `.bin.xz`), and `fine_label_names.txt` if the
            classes are to have names; or with train/<class>/ and test/<class>/.
        augment: pad training images by 4 pixels, cut out 32 x 32 and mirror, at random.
        augmentation: options of `Augmentation`, in place of that.
        validation_fraction: share of the training images held out.
        seed: decides which images are held out; training seeds are another matter.

    Raises:
        FileNotFoundError: no such folder, or it lacks the file (named) of the split.
        ValueError: a damaged file (named), or a share that leaves the split empty.
    """

    kind = _HUNDRED


def read_batch(file: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 (size, 3, 32, 32) and labels (size,) of one binary batch of CIFAR-10, plain or xz-compressed.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, is no whole number of records, or holds a label above 9.
    """
    file = Path(file)
    return _records(file.read_bytes(), file, _TEN)


def _records(content: bytes, name: Path, kind: _Kind) -> tuple[np.ndarray, np.ndarray]:
    try:
        content = lzma.decompress(content) if name.suffix == ".xz" else content
    except lzma.LZMAError as error:
        raise ValueError(f"{name} is damaged: {error}") from error
    size = kind.label_bytes + PIXEL_BYTES
    if not content or len(content) % size:
        message = f"{name} holds {len(content)} bytes, not a whole number of {size}-byte records"
        raise ValueError(f"{message}; fetch the binary version of {kind.title} again")
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, size)
    labels = records[:, kind.label_bytes - 1]
    if labels.max() >= kind.classes:
        record = int(np.argmax(labels >= kind.classes))
        message = f"{name}, record {record}: label {labels[record]} must lie in 0..{kind.classes - 1}"
        raise ValueError(f"{message}; is it {kind.title}?")
    return records[:, kind.label_bytes :].reshape(-1, 3, 32, 32), labels


def _read_side(path: Path, kind: _Kind, side: str) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Images, labels and class names of the training or the test side."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; expected a folder with {kind.expected[side]}")
    listing = Listing(only_archive(path))
    found = _batches(listing, kind, side)
    top = listing.top()
    folder = f"{top}/{side}".lstrip("/")
    if not found and folder in listing.folders:
        return _decoded(listing, folder, kind)
    if not found:
        hint = "; this is the version for Python, the binary version is needed"
        pickled = any(PurePosixPath(name).name == kind.pickled for name in listing.names)
        message = f"{listing.root} holds no {kind.expected[side]} (or .bin.xz)"
        raise FileNotFoundError(f"{message}{hint if pickled else f', and no folder {side}/ of classes'}")
    stems = [PurePosixPath(name).name.removesuffix(".xz") for name in found]
    if len(set(stems)) < len(stems):
        raise ValueError(f"{listing.root} holds a batch twice, plain and compressed; remove one of them")
    batches = [_records(listing.read(name), listing.root / name, kind) for name in found]
    images, labels = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
    return images, labels, _class_names(listing, kind)


def _batches(listing: Listing, kind: _Kind, side: str) -> list[str]:
    inside = (name for name in listing.names if "/" not in name or listing.top())
    return [name for name in inside if re.fullmatch(kind.files[side], PurePosixPath(name).name)]


def _class_names(listing: Listing, kind: _Kind) -> list[str]:
    if kind.classes == len(CLASSES):
        return list(CLASSES)
    listed = [name for name in listing.names if PurePosixPath(name).name == "fine_label_names.txt"]
    if not listed:
        return [f"class {index}" for index in range(kind.classes)]
    names = listing.read(listed[0]).decode("utf-8").split()
    if len(names) != kind.classes:
        raise ValueError(f"{listing.root / listed[0]} names {len(names)} classes, {kind.title} has {kind.classes}")
    return names


def _decoded(listing: Listing, folder: str, kind: _Kind) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Image files below class folders, as pixels; kept in the cache folder when they come from an archive."""
    names = listing.subfolders(folder)
    if len(names) != kind.classes:
        raise ValueError(f"{listing.root / folder} holds {len(names)} classes, {kind.title} has {kind.classes}")
    require("PIL.Image", extra="vision")
    files, labels = labelled(listing, folder, names, "stop")

    def build() -> dict[str, np.ndarray]:
        images = np.empty((len(files), 3, 32, 32), dtype=np.uint8)
        for index, file in enumerate(files):
            picture = open_picture(listing.read(file), listing.root / file)
            images[index] = np.asarray(central_square(picture, 32)).transpose(2, 0, 1)
        return {"images": images}

    if listing.root.is_dir():
        return build()["images"], labels, names
    arrays = load_or_build("images", {**identity(listing.root), "folder": folder, "size": 32}, build)
    return arrays["images"], labels, names
