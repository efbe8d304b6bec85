"""Folders (or archives) of image files, a folder for each class ("image_folder")."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cached_transformers.data.base import SPLIT_WORDS, SPLITS, check_fractions, check_split, items_of_split
from cached_transformers.data.decoding import SUFFIXES
from cached_transformers.registry import DATASETS

from .base import BadFiles, EncodedImages, check_view
from .packed import Listing


class ListedImages(EncodedImages):
    """Images that are files of a `Listing`, `files` their names; the other arguments are those of `EncodedImages`."""

    def __init__(
        self, name: str, split: str, listing: Listing, files: Sequence[str], labels: np.ndarray, **options: Any
    ) -> None:
        super().__init__(name, split, labels, **options)
        self._listing, self._files = listing, list(files)

    def file(self, index: int) -> Path:
        """The file of one item; for an archive, its path with the member's name behind it."""
        return self._listing.root / self._files[self.position(index)]

    def encoded(self, index: int) -> tuple[bytes, object]:
        return self._listing.read(self._files[index]), self.file(index)


@DATASETS.register("image_folder")
class ImageFolder(ListedImages):
    """Classify image files (.jpg, .jpeg, .png) laid out as root/<class>/ or as root/<split>/<class>/.

    Without split folders every class is dealt out by `validation_fraction` and `test_fraction`. With split folders
    (`train`, and `val` or `validation`, and `test`) these are used; when there is none for validation, it is dealt
    from `train` by `validation_fraction`. Classes are the folder names in alphabetical order. A file is decoded when
    its item is asked for, and turned as its EXIF entry says.

    Args:
        split: "train", "validation" or "test".
        path: the root folder, or an archive of it: .tar, .zip, or a compressed tar (unpacked once, to the cache).
        image_size: height and width of an input in pixels.
        channels: 3 (colour) or 1 (grey).
        mean, std: of pixels in 0..1, one number a channel; default: those of ImageNet for colour, 0.5 for grey.
        augment: shift by up to `shift` pixels and mirror (with `flip`) training images at random.
        augmentation: options of `Augmentation`, in place of shift and flip.
        crop_ratio: share of the shorter side that evaluation sees, as timm's crop_pct; null sees the largest square.
        interpolation: "bicubic", "bilinear" or "nearest", of that crop.
        validation_fraction, test_fraction: shares held out where the folders do not say.
        seed: decides which files are held out.
        bad_files: "stop" at a file that cannot be decoded and at a class without a training image, or "skip" them.

    Raises:
        FileNotFoundError: no such folder, or none for the split.
        ValueError: no image, fewer than two classes, a class that training does not have, or one without a training
            image; on access, a file that cannot be decoded (named).
        ImportError: Pillow is not installed.
    """

    def __init__(
        self,
        split: str,
        *,
        path: str | Path,
        image_size: int = 224,
        channels: int = 3,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        augment: bool = True,
        shift: int = 4,
        flip: bool = True,
        augmentation: Mapping[str, Any] | None = None,
        crop_ratio: float | None = None,
        interpolation: str = "bicubic",
        validation_fraction: float = 0.1,
        test_fraction: float = 0.1,
        seed: int = 0,
        bad_files: BadFiles = "stop",
    ) -> None:
        check_view(image_size, channels, crop_ratio, interpolation, bad_files)
        fractions = check_fractions(validation_fraction, test_fraction)
        root = Path(path).expanduser()
        check_split(split)
        if not root.exists():
            raise FileNotFoundError(f"{root} does not exist; expected a folder of root/<class>/*.jpg or *.png")
        listing = Listing(root)
        files, labels, names = _files_of_split(listing, split, fractions, seed, bad_files)
        super().__init__(
            "image_folder",
            split,
            listing,
            files,
            labels,
            class_names=names,
            image_size=image_size,
            channels=channels,
            mean=mean,
            std=std,
            augment=augment,
            shift=shift,
            flip=flip,
            augmentation=augmentation,
            crop_ratio=crop_ratio,
            interpolation=interpolation,
            bad_files=bad_files,
        )


def _files_of_split(
    listing: Listing, split: str, fractions: dict[str, float], seed: int, bad_files: BadFiles
) -> tuple[list[str], np.ndarray, list[str]]:
    """Files, labels and class names of a split."""
    top = listing.top()
    folders = {name: _split_folder(listing, top, name) for name in SPLITS}
    train = folders["train"]
    whole = train if train is not None else top
    names = _class_names(listing, whole)
    if train is None:
        return *dealt(listing, whole, names, split, fractions, seed, bad_files), names
    own = folders[split]
    if own is None and split == "test":
        present = ", ".join(sorted(folder.rpartition("/")[2] for folder in folders.values() if folder))
        message = f"{listing.root} has no folder for split 'test', only {present}"
        raise FileNotFoundError(f"{message}; add one, or train with training.test=none")
    if folders["validation"] is None and split != "test":
        share = {"validation": fractions["validation"]}
        return *dealt(listing, train, names, split, share, seed, bad_files), names
    assert own is not None
    refuse_foreign_classes(listing.root / own, _class_names(listing, own), listing.root / train, names)
    return *labelled(listing, own, names, bad_files if split == "train" else None), names


def dealt(
    listing: Listing,
    folder: str,
    names: Sequence[str],
    split: str,
    fractions: dict[str, float],
    seed: int,
    bad_files: BadFiles,
) -> tuple[list[str], np.ndarray]:
    """The files below the class folders that fall into a split, with their labels.

    Raises:
        ValueError: none does, or a class has no image (unless `bad_files` is "skip").
    """
    files, labels = labelled(listing, folder, names, bad_files)
    chosen = items_of_split(listing.root / folder, labels, fractions, seed, split)
    return [files[index] for index in chosen], labels[chosen]


def labelled(
    listing: Listing, folder: str, names: Sequence[str], empty: BadFiles | None
) -> tuple[list[str], np.ndarray]:
    """All image files below the class folders, in a fixed order, with their labels.

    Args:
        empty: what to do about a class without an image: "stop", "skip" (go on with a warning), or None: nothing.

    Raises:
        ValueError: there is no image at all; or none of some class, and `empty` is "stop".
    """
    place = {name: label for label, name in enumerate(names)}
    start = len(folder) + 1 if folder else 0
    found: list[list[str]] = [[] for _ in names]
    for file in listing.below(folder):
        label = place.get(file[start:].partition("/")[0])
        if label is not None and Path(file).suffix.lower() in SUFFIXES:
            found[label].append(file)
    where = listing.root / folder
    if not any(found):
        raise ValueError(f"{where} holds no image; expected files {', '.join(sorted(SUFFIXES))} in its class folders")
    report_empty_classes(where, [name for name, files in zip(names, found, strict=True) if not files], empty)
    labels = np.repeat(np.arange(len(names)), [len(files) for files in found])
    return [file for files in found for file in files], labels


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


def _split_folder(listing: Listing, top: str, split: str) -> str | None:
    found = [name for name in listing.subfolders(top) if name.lower() in SPLIT_WORDS[split]]
    if len(found) > 1:
        raise ValueError(f"{listing.root} has several folders for split {split!r}: {', '.join(found)}")
    return "/".join(part for part in (top, found[0]) if part) if found else None


def _class_names(listing: Listing, folder: str) -> list[str]:
    names = listing.subfolders(folder)
    if len(names) < 2:
        where, found = listing.root / folder, ", ".join(names) or "no folder"
        raise ValueError(f"{where} must hold one folder for each of two or more classes; found {found}")
    return names
