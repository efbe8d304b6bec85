"""Image files in a folder for each class: which there are, and the data sets that read them when they are asked for."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from cached_lab.data.archives import Listing
from cached_lab.data.image_files import SUFFIXES

from .dataset import BadFiles, EncodedImages


class LabelledFiles(NamedTuple):
    """Names of image files in a listing, and a label for each."""

    listing: Listing
    names: list[str]
    labels: np.ndarray

    def only(self, chosen: np.ndarray) -> LabelledFiles:
        """Some of them."""
        return LabelledFiles(self.listing, [self.names[place] for place in chosen], self.labels[chosen])


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
        """The files below class folders that fall into this split, when shares of some splits are held out.

        Raises:
            ValueError: none does, or a class has no image (unless `bad_files` is "skip").
        """
        files = labelled(listing, classes, self.bad_files)
        return files.only(self._dealt(listing.root, files.labels, *held_out))

    def file(self, index: int) -> Path:
        """The file of one item; for an archive, its path with the member's name behind it."""
        return self._files.listing.root / self._files.names[self.position(index)]

    def encoded(self, index: int) -> tuple[bytes, object]:
        return self._files.listing.read(self._files.names[index]), self.file(index)


def is_image(name: str) -> bool:
    """Whether a file's name is that of an image."""
    return PurePosixPath(name).suffix.lower() in SUFFIXES


def labelled(listing: Listing, classes: Sequence[str], empty: BadFiles | None) -> LabelledFiles:
    """All image files below the class folders of a listing, in a fixed order.

    Args:
        empty: what to do about a class without an image: "stop", "skip" (go on with a warning), or None: nothing.

    Raises:
        ValueError: there is no image at all; or none of some class, and `empty` is "stop".
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
    """Names of the class folders of a listing, sorted (ValueError: there are fewer than two)."""
    names = listing.subfolders()
    if len(names) < 2:
        found = ", ".join(names) or "no folder"
        raise ValueError(
            f"{listing.root} must hold one folder for each of two or more classes; found {found}; see data.path"
        )
    return names


def refuse_foreign_classes(where: object, found: Sequence[str], training: object, names: Sequence[str]) -> None:
    """ValueError for classes that were found elsewhere and that training does not have."""
    foreign = sorted(set(found) - set(names))
    if foreign:
        raise ValueError(f"{where} has classes that {training} has not: {', '.join(foreign[:5])}")


def report_empty_classes(where: object, names: Sequence[str], empty: BadFiles | None) -> None:
    """Stop at classes without an image, or go on with a warning; either way they are counted and named."""
    if not names or empty is None:
        return
    listed = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
    message = f"{where}: {len(names)} of its classes have no image: {listed}"
    if empty == "stop":
        raise ValueError(f"{message}; add images, remove the folders, or set data.bad_files=skip to train without them")
    warnings.warn(f"{message}; they keep their places among the outputs", RuntimeWarning, stacklevel=2)
