"""CIFAR-10 ("cifar10"): 32 x 32 colour images of ten classes.

Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009). A record of the binary version is
one byte of label and 3,072 bytes of pixels: red, green and blue plane, each row by row. torchvision reads the pickled
version only, and unpickling runs any code in the file.
"""

from __future__ import annotations

import lzma
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from cached_lab.data.archives import naming, open_listing
from cached_lab.registries import DATASETS

from .dataset import StoredImages

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
RECORD_BYTES = 1 + 3 * 32 * 32


@DATASETS.register("cifar10")
@dataclass(kw_only=True, eq=False, repr=False)
class CIFAR10(StoredImages):
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

    name = "cifar10"
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of its 50,000 training images
    path: str | Path

    def _read(self) -> tuple[np.ndarray, np.ndarray, list[str]]:
        stem = "test_batch" if self.split == "test" else r"data_batch_\d+"
        listing = open_listing(self.path)
        # The batches may be anywhere in an archive; subfolders of a folder may hold copies of them.
        files = {PurePosixPath(name).name: name for name in listing.names if listing.archive or "/" not in name}
        found = sorted(name for name in files if re.fullmatch(rf"{stem}\.bin(\.xz)?", name))
        if not found:
            wanted = f"{stem}.bin (or .bin.xz)"
            raise FileNotFoundError(f"{listing.root} holds no {wanted}; fetch the binary version of CIFAR-10")
        if len({name.removesuffix(".xz") for name in found}) < len(found):
            raise ValueError(f"{listing.root} holds a batch twice, plain and compressed; remove one of them")
        batches = [records(listing.read(files[name]), listing.root / files[name]) for name in found]
        images, labels = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
        if self.split != "test":
            chosen = self._dealt(self.path, labels, "validation")
            images, labels = images[chosen], labels[chosen]
        return images, labels, list(CLASSES)


def records(content: bytes, name: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 (size, 3, 32, 32) and labels (size,) of the content of a binary file, plain or xz-compressed.

    Raises:
        ValueError: damage, a partial record, or a label outside the classes.
    """
    with naming(name, "file"):
        content = lzma.decompress(content) if name.suffix == ".xz" else content
    if not content or len(content) % RECORD_BYTES:
        message = f"{name} holds {len(content)} bytes, not a whole number of {RECORD_BYTES}-byte records"
        raise ValueError(f"{message}; fetch the binary version of CIFAR-10 again")
    found = np.frombuffer(content, dtype=np.uint8).reshape(-1, RECORD_BYTES)
    labels = found[:, 0]
    if labels.max() >= len(CLASSES):
        record = int(np.argmax(labels >= len(CLASSES)))
        raise ValueError(f"{name}, record {record}: label {labels[record]} must lie in 0..9; is it CIFAR-10?")
    return found[:, 1:].reshape(-1, 3, 32, 32), labels
