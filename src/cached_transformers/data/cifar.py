"""CIFAR-10 in its binary form ("cifar10"): 32 x 32 colour images of ten classes.

Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009). A record is one byte of label and
3,072 bytes of pixels: red, green and blue plane, each row by row. Files may be xz-compressed.
"""

from __future__ import annotations

import lzma
import re
from pathlib import Path

import numpy as np

from ..registry import DATASETS
from .base import check_fraction, check_split, stratified_split
from .images import StoredImages

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
RECORD_BYTES = 1 + 3 * 32 * 32
_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the 50,000 training images
_FILES = {"train": r"data_batch_\d+\.bin(\.xz)?", "test": r"test_batch\.bin(\.xz)?"}
_EXPECTED = {"train": "data_batch_1.bin ... data_batch_5.bin", "test": "test_batch.bin"}


@DATASETS.register("cifar10")
class CIFAR10(StoredImages):
    """Classify CIFAR-10 images from the binary batches (`.bin` or `.bin.xz`); all batches in the folder are read.

    The validation split is dealt from the training batches, with equal shares of every class.

    Args:
        split: "train", "validation" or "test".
        path: folder with `data_batch_*.bin` and `test_batch.bin`.
        augment: pad training images by 4 pixels, cut out 32 x 32 and mirror, at random.
        validation_fraction: share of the training batches held out.
        seed: decides which images are held out; training seeds are another matter.

    Raises:
        FileNotFoundError: no such folder, or it lacks the batches (named) of the split.
        ValueError: a damaged batch (named), or a share that leaves the split empty.
    """

    def __init__(
        self,
        split: str,
        *,
        path: str | Path,
        augment: bool = True,
        validation_fraction: float = 0.1,
        seed: int = 0,
    ) -> None:
        check_fraction("validation_fraction", validation_fraction)
        side = "test" if check_split(split) == "test" else "train"
        batches = [read_batch(file) for file in _find_batches(Path(path).expanduser(), side)]
        images, labels = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
        if side == "train":
            chosen = stratified_split(labels, {"validation": validation_fraction}, seed)[split]
            if not len(chosen):
                raise ValueError(f"validation_fraction={validation_fraction} leaves split {split!r} empty; raise it")
            images, labels = images[chosen], labels[chosen]
        super().__init__(
            "cifar10",
            split,
            images,
            labels,
            class_names=CLASSES,
            mean=_MEAN,
            std=_STD,
            augment=augment,
            shift=4,
            flip=True,
        )


def read_batch(file: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 (size, 3, 32, 32) and labels (size,) of one binary batch, plain or xz-compressed.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, is no whole number of records, or holds a label above 9.
    """
    file = Path(file)
    content = file.read_bytes()
    try:
        content = lzma.decompress(content) if file.suffix == ".xz" else content
    except lzma.LZMAError as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if not content or len(content) % RECORD_BYTES:
        message = f"{file} holds {len(content)} bytes, not a whole number of {RECORD_BYTES}-byte records"
        raise ValueError(f"{message}; fetch the binary version of CIFAR-10 again")
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, RECORD_BYTES)
    labels = records[:, 0]
    if labels.max() >= len(CLASSES):
        record = int(np.argmax(labels >= len(CLASSES)))
        raise ValueError(f"{file}, record {record}: label {labels[record]} must lie in 0..9; is it CIFAR-10?")
    return records[:, 1:].reshape(-1, 3, 32, 32), labels


def _find_batches(folder: Path, side: str) -> list[Path]:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist; expected a folder with {_EXPECTED[side]}")
    found = sorted(file for file in folder.iterdir() if re.fullmatch(_FILES[side], file.name))
    if not found:
        hint = ""
        if (folder / "data_batch_1").is_file():
            hint = "; this is the version for Python, the binary version is needed"
        raise FileNotFoundError(f"{folder} holds no {_EXPECTED[side]} (or .bin.xz){hint}")
    stems = [file.name.removesuffix(".xz") for file in found]
    if len(set(stems)) < len(stems):
        raise ValueError(f"{folder} holds a batch twice, plain and compressed; remove one of them")
    return found
