"""CIFAR-10 and CIFAR-100 ("cifar10", "cifar100"): 32 x 32 colour images of ten and a hundred classes.

Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009). A record of the binary version is
one byte of label (CIFAR-100: coarse label, then fine label) and 3,072 bytes of pixels: red, green and blue plane, each
row by row. torchvision reads the pickled version only, and unpickling runs any code in the file.

Handwritten digits of scikit-learn ("digits"): 1,797 grey images of 8 x 8 pixels, without a download. Source: Alpaydin
and Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository (1998).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import ClassVar

import numpy as np

from cached_lab.data.archives import as_text, naming, open_listing, unpacked
from cached_lab.data.splits import items_of_split
from cached_lab.registries import DATASETS
from cached_transformers.extras import require

from .dataset import StoredImages

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PIXEL_BYTES = 3 * 32 * 32


@dataclass(kw_only=True, eq=False, repr=False)
class _CIFAR(StoredImages):
    """Base of both data sets; `files` is a pattern of file names per side, `names` a file of class names."""

    title, count, label_bytes, names = "", 0, 0, ""
    files: ClassVar[dict[str, str]] = {}
    path: str | Path

    def _read(self) -> tuple[np.ndarray, np.ndarray, list[str]]:
        side = "test" if self.split == "test" else "train"
        listing = open_listing(self.path)
        # The batches may be anywhere in an archive; subfolders of a folder may hold copies of them.
        files = {PurePosixPath(name).name: name for name in listing.names if listing.archive or "/" not in name}
        found = sorted(name for name in files if re.fullmatch(rf"{self.files[side]}\.bin(\.xz)?", name))
        if not found:
            wanted = f"{self.files[side]}.bin (or .bin.xz)"
            raise FileNotFoundError(f"{listing.root} holds no {wanted}; fetch the binary version of {self.title}")
        if len({name.removesuffix(".xz") for name in found}) < len(found):
            raise ValueError(f"{listing.root} holds a batch twice, plain and compressed; remove one of them")
        batches = [self.records(listing.read(files[name]), listing.root / files[name]) for name in found]
        images, labels = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
        names = [f"class {number}" for number in range(self.count)] if self.count > len(CLASSES) else list(CLASSES)
        if self.names in files:
            file = listing.root / files[self.names]
            names = as_text(listing.read(files[self.names]), file).split()
            if len(names) != self.count:
                raise ValueError(f"{file} names {len(names)} classes, {self.title} has {self.count}; fetch it again")
        if side == "train":
            chosen = self._dealt(self.path, labels, "validation")
            images, labels = images[chosen], labels[chosen]
        return images, labels, names

    @classmethod
    def records(cls, content: bytes, name: Path) -> tuple[np.ndarray, np.ndarray]:
        """Images uint8 (size, 3, 32, 32) and labels (size,) of the content of a binary file, plain or xz-compressed.

        Raises:
            ValueError: damage, a partial record, or a label outside the classes.
        """
        with naming(name, "file"):
            content = unpacked(content, name, name.suffix)
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


@DATASETS.register("cifar10")
@dataclass(kw_only=True, eq=False, repr=False)
class CIFAR10(_CIFAR):
    """Classify CIFAR-10 images from the binary batches.

    The validation split is dealt from the training batches, with equal shares of every class. A folder of image files
    is read by `image_folder`.

    Args:
        path: folder or archive with `data_batch_*.bin` and `test_batch.bin` (or `.bin.xz`).
        others: see `ImageDataset`.

    Raises:
        FileNotFoundError: no such folder, or it lacks the batches (named) of the split.
        ValueError: a damaged batch (named), or a share that leaves the split empty.
    """

    name, title, count, label_bytes = "cifar10", "CIFAR-10", 10, 1
    files: ClassVar = {"train": r"data_batch_\d+", "test": "test_batch"}
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of its 50,000 training images


@DATASETS.register("cifar100")
@dataclass(kw_only=True, eq=False, repr=False)
class CIFAR100(_CIFAR):
    """Classify CIFAR-100 images by their hundred fine classes, from the binary files.

    Args:
        path: folder or archive with `train.bin` and `test.bin` (or `.bin.xz`), and optionally `fine_label_names.txt`.
        others, errors: see `CIFAR10`.
    """

    name, title, count, label_bytes, names = "cifar100", "CIFAR-100", 100, 2, "fine_label_names.txt"
    files: ClassVar = {"train": "train", "test": "test"}
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)  # of its 50,000 training images


@DATASETS.register("digits")
@dataclass(kw_only=True, eq=False, repr=False)
class Digits(StoredImages):
    """Classify scikit-learn's handwritten digits (8 x 8, grey); split by seed with equal shares of every class.

    Training images are shifted by up to one pixel, and not mirrored.

    Args:
        validation_fraction, test_fraction: shares held out.
        others: see `ImageDataset`.

    Raises:
        ValueError: shares that leave nothing to train on, or nothing in this split.
        ImportError: scikit-learn is not installed.
    """

    name, channels, shift, flip = "digits", 1, 1, False
    validation_fraction: float = 0.15
    test_fraction: float = 0.15

    def _read(self) -> tuple[np.ndarray, np.ndarray, list[str]]:
        digits = require("sklearn.datasets", extra="data").load_digits()
        shares = {"validation": self.validation_fraction, "test": self.test_fraction}
        train = items_of_split("digits", digits.target, shares, self.seed, "train")
        chosen = self._dealt("digits", digits.target, *shares)
        images = np.round(digits.images * (255 / 16)).astype(np.uint8)[:, None]  # stored as 0..16
        seen = images[train] / 255
        self.mean, self.std = [float(seen.mean())], [float(seen.std())]
        return images[chosen], digits.target[chosen], [str(digit) for digit in range(10)]
