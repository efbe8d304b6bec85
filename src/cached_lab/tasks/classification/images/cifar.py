"""CIFAR-10 and CIFAR-100 ("cifar10", "cifar100"): 32 x 32 colour images of ten and a hundred classes.

Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009). A binary record is one byte of label
(CIFAR-100: coarse label, then fine label) and 3,072 bytes of pixels: red, green and blue plane, each row by row. Files
may be xz-compressed, and folders may be archives. The same images as PNG or JPEG files, in folders train/<class>/ and
test/<class>/, are read too. torchvision reads the pickled version only, and unpickling runs any code in the file.
"""

from __future__ import annotations

import hashlib
import lzma
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar

import numpy as np

from cached_lab.data.archives import Listing, as_text, identity, open_listing
from cached_lab.data.image_files import open_picture
from cached_lab.data.store import load_or_build
from cached_lab.registries import DATASETS
from cached_transformers.extras import require

from .augmentation import central_square
from .class_folders import labelled
from .dataset import StoredImages

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PIXEL_BYTES = 3 * 32 * 32


@dataclass(kw_only=True, eq=False, repr=False)
class _CIFAR(StoredImages):
    """Base of both data sets.

    Attributes:
        files: per side, a pattern of file names, and their name in messages. pickled: a file of the Python version.
    """

    title, count, label_bytes, pickled = "", 0, 0, ""
    files: ClassVar[dict[str, tuple[str, str]]] = {}
    path: str | Path

    def _read(self) -> tuple[np.ndarray, np.ndarray, list[str]]:
        side = "test" if self.split == "test" else "train"
        images, labels, names = self._read_side(side)
        if side == "train":
            chosen = self._dealt(self.path, labels, "validation")
            images, labels = images[chosen], labels[chosen]
        return images, labels, names

    def _read_side(self, side: str) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Images, labels and class names of the training or the test side."""
        pattern, expected = self.files[side]
        listing = open_listing(self.path, f"a folder with {expected}")
        # The batches may be anywhere in an archive; subfolders of a folder may hold copies of them.
        files = [name for name in listing.names if listing.archive or "/" not in name]
        found = [name for name in files if re.fullmatch(pattern, PurePosixPath(name).name)]
        if not found and side in listing.folders:
            return self._decoded(listing.inside(side))
        if not found:
            hint = "; this is the version for Python, the binary version is needed"
            pickled = any(PurePosixPath(name).name == self.pickled for name in listing.names)
            message = f"{listing.root} holds no {expected} (or .bin.xz)"
            raise FileNotFoundError(f"{message}{hint if pickled else f', and no folder {side}/ of classes'}")
        if len({PurePosixPath(name).name.removesuffix(".xz") for name in found}) < len(found):
            raise ValueError(f"{listing.root} holds a batch twice, plain and compressed; remove one of them")
        batches = [self.records(listing.read(name), listing.root / name) for name in found]
        images, labels = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
        return images, labels, self._class_names(listing)

    @classmethod
    def records(cls, content: bytes, name: Path) -> tuple[np.ndarray, np.ndarray]:
        """Images uint8 (size, 3, 32, 32) and labels (size,) of the content of a binary file, plain or xz-compressed.

        Raises:
            ValueError: damage, a partial record, or a label outside the classes.
        """
        try:
            content = lzma.decompress(content) if name.suffix == ".xz" else content
        except lzma.LZMAError as error:
            raise ValueError(f"{name} is damaged: {error}") from error
        size = cls.label_bytes + PIXEL_BYTES
        if not content or len(content) % size:
            message = f"{name} holds {len(content)} bytes, not a whole number of {size}-byte records"
            raise ValueError(f"{message}; fetch the binary version of {cls.title} again")
        records = np.frombuffer(content, dtype=np.uint8).reshape(-1, size)
        labels = records[:, cls.label_bytes - 1]
        if labels.max() >= cls.count:
            record = int(np.argmax(labels >= cls.count))
            message = f"{name}, record {record}: label {labels[record]} must lie in 0..{cls.count - 1}"
            raise ValueError(f"{message}; is it {cls.title}?")
        return records[:, cls.label_bytes :].reshape(-1, 3, 32, 32), labels

    def _class_names(self, listing: Listing) -> list[str]:
        if self.count == len(CLASSES):
            return list(CLASSES)
        listed = [name for name in listing.names if PurePosixPath(name).name == "fine_label_names.txt"]
        if not listed:
            return [f"class {number}" for number in range(self.count)]
        names = as_text(listing.read(listed[0]), listing.root / listed[0]).split()
        if len(names) != self.count:
            raise ValueError(f"{listing.root / listed[0]} names {len(names)} classes, {self.title} has {self.count}")
        return names

    def _decoded(self, listing: Listing) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Image files below class folders, as pixels; decoded once, and cached until an archive or file changes."""
        names = listing.subfolders()
        if len(names) != self.count:
            raise ValueError(f"{listing.root} holds {len(names)} classes, {self.title} has {self.count}")
        require("PIL.Image", extra="vision")
        files = labelled(listing, names, "stop")
        if listing.archive is not None:
            key = {**identity(listing.archive), "folder": listing.folder.rstrip("/")}
        else:
            digest = hashlib.sha256()
            for name in files.names:
                status = (listing.root / name).stat()
                facts = repr((name, status.st_size, status.st_mtime_ns))
                digest.update(facts.encode("utf-8", "surrogateescape"))
            key = {"version": 1, "path": str(listing.root.resolve()), "files": digest.hexdigest()}

        def build() -> dict[str, np.ndarray]:
            images = np.empty((len(files.names), 3, 32, 32), dtype=np.uint8)
            for index, name in enumerate(files.names):
                picture = open_picture(listing.read(name), listing.root / name)
                images[index] = np.asarray(central_square(picture, 32)).transpose(2, 0, 1)
            return {"images": images}

        return load_or_build("images", {**key, "size": 32}, build)["images"], files.labels, names


@DATASETS.register("cifar10")
@dataclass(kw_only=True, eq=False, repr=False)
class CIFAR10(_CIFAR):
    """Classify CIFAR-10 images from the binary batches (`.bin` or `.bin.xz`), or from PNG or JPEG files.

    The validation split is dealt from the training batches, with equal shares of every class.

    Args:
        path: folder or archive with `data_batch_*.bin` and `test_batch.bin`, or with train/<class>/ and test/<class>/,
            which are decoded once and cached.
        others: see `ImageDataset`.

    Raises:
        FileNotFoundError: no such folder, or it lacks the batches (named) of the split.
        ValueError: a damaged batch or file (named), or a share that leaves the split empty.
    """

    name, title, count, label_bytes, pickled = "cifar10", "CIFAR-10", 10, 1, "data_batch_1"
    files: ClassVar = {
        "train": (r"data_batch_\d+\.bin(\.xz)?", "data_batch_1.bin ... data_batch_5.bin"),
        "test": (r"test_batch\.bin(\.xz)?", "test_batch.bin"),
    }
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of its 50,000 training images


@DATASETS.register("cifar100")
@dataclass(kw_only=True, eq=False, repr=False)
class CIFAR100(_CIFAR):
    """Classify CIFAR-100 images by their hundred fine classes, from the binary files or from PNG or JPEG files.

    Args:
        path: folder or archive with `train.bin` and `test.bin` (or `.bin.xz`), and optionally `fine_label_names.txt`;
            or with train/<class>/ and test/<class>/, which are decoded once and cached.
        others, errors: see `CIFAR10`.
    """

    name, title, count, label_bytes, pickled = "cifar100", "CIFAR-100", 100, 2, "train"
    files: ClassVar = {side: (rf"{side}\.bin(\.xz)?", f"{side}.bin") for side in ("train", "test")}
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)  # of its 50,000 training images
