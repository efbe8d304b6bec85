"""Tiny-ImageNet ("tiny_imagenet"): 200 classes of ImageNet at 64 x 64 pixels.

Source: Le and Yang, "Tiny ImageNet Visual Recognition Challenge", Stanford CS 231N (2015). The layout of its archive is
train/<wnid>/images/*.JPEG, val/images/*.JPEG with val/val_annotations.txt (file, wnid and a box on each line), and
test/images/ without labels. Packs that have val/<wnid>/*.JPEG, of any image size, are read as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from cached_transformers.data.base import check_fraction, check_split
from cached_transformers.data.decoding import SUFFIXES
from cached_transformers.registry import DATASETS

from .base import BadFiles, check_view
from .image_folder import ListedImages, dealt, labelled
from .packed import Listing, only_archive

_MEAN, _STD = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)  # of its 100,000 training images


@DATASETS.register("tiny_imagenet")
class TinyImageNet(ListedImages):
    """Classify Tiny-ImageNet from its folder or archive (`tiny-imagenet-200.zip`), or from a pack of smaller images.

    Its own validation images are the "test" split here, since those that it calls test have no labels; "validation" is
    dealt from the training images, so that choosing a checkpoint and reporting it are done on different images. With
    `validation_fraction: 0` its validation images are both.

    Args:
        split: "train", "validation" or "test".
        path: the folder or archive; a folder that holds nothing but one archive will do.
        image_size: height and width of an input in pixels, 64 as published.
        augment: shift by up to an eighth of the size and mirror training images at random.
        augmentation: options of `Augmentation`, in place of that.
        crop_ratio: share of the shorter side that evaluation sees; null sees all.
        interpolation: "bicubic", "bilinear" or "nearest".
        validation_fraction: share of every class of the training images held out.
        seed: decides which.
        bad_files: "stop" at a file that cannot be decoded, or "skip" it.

    Raises:
        FileNotFoundError: no such path, or it lacks train/ or val/.
        ValueError: a class without an image, an annotation that names no file, or a file without an annotation.
    """

    def __init__(
        self,
        split: str,
        *,
        path: str | Path,
        image_size: int = 64,
        augment: bool = True,
        augmentation: Mapping[str, Any] | None = None,
        crop_ratio: float | None = None,
        interpolation: str = "bicubic",
        validation_fraction: float = 0.1,
        seed: int = 0,
        bad_files: BadFiles = "stop",
    ) -> None:
        check_view(image_size, 3, crop_ratio, interpolation, bad_files)
        check_fraction("validation_fraction", validation_fraction)
        check_split(split)
        listing = Listing(only_archive(Path(path).expanduser()))
        top = listing.top()
        train, val = (f"{top}/{name}".lstrip("/") for name in ("train", "val"))
        for folder in (train, val):
            if folder not in listing.folders:
                raise FileNotFoundError(f"{listing.root} has no folder {folder}/; expected train/<wnid>/ and val/")
        names = listing.subfolders(train)
        if split == "test" or (split == "validation" and validation_fraction == 0):
            files, labels = _validation(listing, val, names)
        else:
            share = {"validation": validation_fraction}
            files, labels = dealt(listing, train, names, split, share, seed, bad_files)
        super().__init__(
            "tiny_imagenet",
            split,
            listing,
            files,
            labels,
            class_names=_words(listing, top, names),
            image_size=image_size,
            mean=_MEAN,
            std=_STD,
            augment=augment,
            augmentation=augmentation,
            crop_ratio=crop_ratio,
            interpolation=interpolation,
            bad_files=bad_files,
        )


def _validation(listing: Listing, val: str, names: list[str]) -> tuple[list[str], np.ndarray]:
    annotations = f"{val}/val_annotations.txt"
    if annotations not in listing.names:
        return labelled(listing, val, names, None)
    place = {name: label for label, name in enumerate(names)}
    labels: dict[str, int] = {}
    for number, line in enumerate(listing.read(annotations).decode("utf-8").splitlines(), 1):
        parts = line.split("\t") if "\t" in line else line.split()
        if not parts:
            continue
        if len(parts) < 2 or parts[1] not in place:
            raise ValueError(f"{listing.root / annotations}, line {number}: {line!r} names no class of train/")
        labels[parts[0]] = place[parts[1]]
    files = [f for f in listing.below(val) if PurePosixPath(f).suffix.lower() in SUFFIXES]
    found = {PurePosixPath(file).name for file in files}
    for what, missing in (("no file for", set(labels) - found), ("no annotation for", found - set(labels))):
        if missing:
            listed = ", ".join(sorted(missing)[:5])
            raise ValueError(f"{listing.root / val} has {what} {len(missing)} images ({listed}); fetch it again")
    return files, np.array([labels[PurePosixPath(file).name] for file in files], dtype=np.int64)


def _words(listing: Listing, top: str, names: list[str]) -> list[str]:
    """First word of each class from words.txt (wnid, tab, words); the wnid where there is none."""
    file = f"{top}/words.txt".lstrip("/")
    if file not in listing.names:
        return names
    lines = listing.read(file).decode("utf-8", "replace").splitlines()
    words = {wnid: text.split(",")[0].strip() for wnid, _, text in (line.partition("\t") for line in lines)}
    return [words.get(name) or name for name in names]
