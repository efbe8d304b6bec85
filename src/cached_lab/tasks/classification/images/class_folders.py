"""Image files in a folder per class, in a folder or an archive ("image_folder"), and the base of readers of such files.

torchvision's ImageFolder opens no archive, and has no splits and no rule for bad files.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from cached_lab.data.archives import Listing, open_listing
from cached_lab.data.image_files import SUFFIXES
from cached_lab.data.splits import SPLIT_WORDS, SPLITS
from cached_lab.registries import DATASETS

from .dataset import BadFiles, EncodedImages


class LabelledFiles(NamedTuple):
    """Names of image files in a listing, with a label each."""

    listing: Listing
    names: list[str]
    labels: np.ndarray


@dataclass(kw_only=True, eq=False, repr=False)
class ListedImages(EncodedImages):
    """Images that are files of a `Listing`; subclasses find them in `_find`."""

    def _find(self) -> tuple[LabelledFiles, list[str]]:
        """The files of the split, and the names of all classes."""
        raise NotImplementedError("abstract: a reader finds the files of a split")

    def _load(self) -> tuple[np.ndarray, list[str]]:
        self._files, names = self._find()
        return self._files.labels, names

    def _dealt_files(self, listing: Listing, classes: Sequence[str], *held_out: str) -> LabelledFiles:
        """The files below class folders that are dealt to this split, with the `held_out` splits."""
        files = labelled(listing, classes, self.bad_files)
        chosen = self._dealt(listing.root, files.labels, *held_out)
        return LabelledFiles(listing, [files.names[place] for place in chosen], files.labels[chosen])

    def file(self, index: int) -> Path:
        """The file of one item; for an archive, its path followed by the member's name."""
        return self._files.listing.root / self._files.names[self.position(index)]

    def encoded(self, index: int) -> tuple[bytes, object]:
        return self._files.listing.read(self._files.names[index]), self.file(index)


@DATASETS.register("image_folder")
@dataclass(kw_only=True, eq=False, repr=False)
class ImageFolder(ListedImages):
    """Classify image files (.jpg, .jpeg, .png) laid out as root/<class>/ or as root/<split>/<class>/.

    Without split folders every class is dealt out by `validation_fraction` and `test_fraction`. Split folders (`train`,
    and `val` or `validation`, and `test`) are used as such; without one for validation, `validation_fraction` is dealt
    from `train`. Classes are the folder names in alphabetical order. A file is decoded on access, and turned according
    to its EXIF entry.

    Args:
        path: the root folder, or an archive of it: .tar, .zip, or a compressed tar (unpacked once, to the cache).
        channels: 3 (colour) or 1 (grey).
        test_fraction: share of every class held out for testing, without split folders.
        others: see `EncodedImages`.

    Raises:
        FileNotFoundError: no such folder, or none for the split.
        ValueError: no image, fewer than two classes, a class that training lacks, or one without a training image.
    """

    name, shift = "image_folder", 4
    path: str | Path
    channels: int = 3
    test_fraction: float = 0.1

    def _find(self) -> tuple[LabelledFiles, list[str]]:
        listing = open_listing(self.path)
        parts: dict[str, Listing] = {}
        for name in listing.subfolders():
            for split in SPLITS:
                if name.lower() in SPLIT_WORDS[split]:
                    if split in parts:
                        raise ValueError(f"{listing.root} has several folders for split {split!r}, such as {name}")
                    parts[split] = listing.inside(name)
        if "train" not in parts:
            names = class_names(listing)
            return self._dealt_files(listing, names, "validation", "test"), names
        train = parts["train"]
        names = class_names(train)
        if self.split == "test" and "test" not in parts:
            message = f"{listing.root} has no folder for split 'test'"
            raise FileNotFoundError(f"{message}; add one, or train with training.test=none")
        if "validation" not in parts and self.split != "test":
            return self._dealt_files(train, names, "validation"), names
        part = parts[self.split]
        refuse_foreign_classes(part.root, class_names(part), train.root, names)
        return labelled(part, names, self.bad_files if self.split == "train" else None), names


def is_image(name: str) -> bool:
    """True for the name of an image file."""
    return PurePosixPath(name).suffix.lower() in SUFFIXES


def labelled(listing: Listing, classes: Sequence[str], empty: BadFiles | None) -> LabelledFiles:
    """All image files below the class folders of a listing, in a fixed order.

    Args:
        empty: action for a class without an image: "stop", "skip" (with a warning), or None for no check.

    Raises:
        ValueError: no image at all; or none of some class, and `empty` is "stop".
    """
    found: dict[str, list[str]] = {name: [] for name in classes}
    for file in listing.names:
        if (folder := file.partition("/")[0]) in found and is_image(file):
            found[folder].append(file)
    if not any(found.values()):
        suffixes = ", ".join(sorted(SUFFIXES))
        raise ValueError(f"{listing.root} holds no image; expected files {suffixes} in its class folders")
    report_empty_classes(listing.root, [name for name, files in found.items() if not files], empty)
    labels = np.repeat(np.arange(len(found)), [len(files) for files in found.values()])
    return LabelledFiles(listing, [file for files in found.values() for file in files], labels)


def class_names(listing: Listing) -> list[str]:
    """Sorted names of the class folders of a listing (ValueError: fewer than two)."""
    names = listing.subfolders()
    if len(names) < 2:
        found = ", ".join(names) or "no folder"
        raise ValueError(f"{listing.root} must hold one folder for each of two or more classes; found {found}")
    return names


def refuse_foreign_classes(where: object, found: Sequence[str], training: object, names: Sequence[str]) -> None:
    """Refuse classes that training does not have (ValueError)."""
    foreign = sorted(set(found) - set(names))
    if foreign:
        raise ValueError(f"{where} has classes that {training} has not: {', '.join(foreign[:5])}")


def report_empty_classes(where: object, names: Sequence[str], empty: BadFiles | None) -> None:
    """Stop at classes without an image, or warn of them; both count and name them."""
    if not names or empty is None:
        return
    listed = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
    message = f"{where}: {len(names)} of its classes have no image: {listed}"
    if empty == "stop":
        raise ValueError(f"{message}; add images, remove the folders, or set data.bad_files=skip to train without them")
    warnings.warn(f"{message}; they keep their places among the outputs", RuntimeWarning, stacklevel=2)
