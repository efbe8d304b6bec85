"""Image files in a folder per class ("image_folder"), and ImageNet-1k and Tiny-ImageNet ("imagenet", "tiny_imagenet").

Sources: Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge" (arXiv:1409.0575), ILSVRC 2012, 1,000
classes; Le and Yang, "Tiny ImageNet Visual Recognition Challenge", Stanford CS 231N (2015), 200 classes at 64 x 64.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from cached_lab.data.archives import Listing, as_text, open_listing
from cached_lab.data.image_files import SUFFIXES
from cached_lab.data.splits import SPLIT_WORDS, SPLITS
from cached_lab.registries import DATASETS

from .dataset import BadFiles, EncodedImages

_LISTS = ("val.txt", "LOC_val_solution.csv", "val/val_annotations.txt")


@dataclass(kw_only=True, eq=False, repr=False)
class _ListedImages(EncodedImages):
    """Images that are files of a `Listing`; subclasses set `_listing` and `_names` in `_load`."""

    path: str | Path

    def _labelled(self, listing: Listing, classes: Sequence[str], *held_out: str, check: bool = True) -> np.ndarray:
        """Take the files below class folders, or those dealt to this split, with the `held_out` splits; return labels.

        Args:
            check: stop at classes without an image, or warn of them.

        Raises:
            ValueError: no image at all, or none of some class.
        """
        found: dict[str, list[str]] = {name: [] for name in classes}
        for file in listing.names:
            if (folder := file.partition("/")[0]) in found and is_image(file):
                found[folder].append(file)
        if not any(found.values()):
            suffixes = ", ".join(sorted(SUFFIXES))
            raise ValueError(f"{listing.root} holds no image; expected files {suffixes} in its class folders")
        if check:
            report_empty_classes(listing.root, [name for name, files in found.items() if not files], self.bad_files)
        labels = np.repeat(np.arange(len(found)), [len(files) for files in found.values()])
        chosen = self._dealt(listing.root, labels, *held_out) if held_out else np.arange(len(labels))
        names = [file for files in found.values() for file in files]
        self._listing, self._names = listing, [names[place] for place in chosen]
        return labels[chosen]

    def file(self, index: int) -> Path:
        """The file of one item; for an archive, its path followed by the member's name."""
        return self._listing.root / self._names[self.position(index)]

    def encoded(self, index: int) -> bytes:
        return self._listing.read(self._names[index])


@DATASETS.register("image_folder")
@dataclass(kw_only=True, eq=False, repr=False)
class ImageFolder(_ListedImages):
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
    channels: int = 3
    test_fraction: float = 0.1

    def _load(self) -> tuple[np.ndarray, list[str]]:
        listing = open_listing(self.path)
        parts: dict[str, Listing] = {}
        for name in listing.subfolders():
            for split in SPLITS:
                if name.lower() in SPLIT_WORDS[split]:
                    if split in parts:
                        raise ValueError(f"{listing.root} has several folders for split {split!r}, such as {name}")
                    parts[split] = listing.inside(name)
        train = parts.get("train", listing)
        names = class_names(train)
        if "train" not in parts:
            return self._labelled(listing, names, "validation", "test"), names
        if self.split not in parts and self.split == "test":
            message = f"{listing.root} has no folder for split 'test'"
            raise FileNotFoundError(f"{message}; add one, or train with training.test=none")
        if "validation" not in parts and self.split != "test":
            return self._labelled(train, names, "validation"), names
        refuse_foreign_classes(parts[self.split], train, names)
        return self._labelled(parts[self.split], names, check=self.split == "train"), names


@dataclass(kw_only=True, eq=False, repr=False)
class _OfficialLayout(_ListedImages):
    """Images in train/<wnid>/, and in val/ in folders by class or with a list of their classes."""

    def _load(self) -> tuple[np.ndarray, list[str]]:
        listing = open_listing(self.path, open_tars=True)
        val = next((name for name in ("val", "ILSVRC2012_img_val") if name in listing.folders), None)
        if val is None or "train" not in listing.folders:
            wanted = "folders train/ (of <wnid>/ or <wnid>.tar) and val/ (or ILSVRC2012_img_val.tar)"
            raise FileNotFoundError(f"{listing.root} must hold {wanted}; unpack the archives of the data set there")
        train, test = listing.inside("train"), listing.inside(val)
        names = class_names(train)
        if self.split == "train" or (self.split == "validation" and self.validation_fraction):
            return self._labelled(train, names, "validation"), names
        found = next((name for name in _LISTS if name in listing), None)
        if found is None:
            if not test.subfolders():
                raise FileNotFoundError(f"{test.root} has no class folders; list its classes in {', '.join(_LISTS)}")
            refuse_foreign_classes(test, train, names)
            return self._labelled(test, names, check=False), names
        self._listing, self._names = test, [name for name in test.names if is_image(name)]
        return read_labels(listing.read(found), listing.root / found, self._names, names), names


@DATASETS.register("imagenet")
@dataclass(kw_only=True, eq=False, repr=False)
class ImageNet(_OfficialLayout):
    """Classify ImageNet-1k from its own layout: train/<wnid>/ or train/<wnid>.tar, and val/ with or without folders.

    The images of val/ (or ILSVRC2012_img_val.tar) are in folders by class, or side by side with a list of their classes
    beside val/: val.txt or LOC_val_solution.csv (per line a file, and its wnid or the index of the sorted wnids). They
    are the "test" split, and "validation" too unless `validation_fraction` holds training images out, since labels of
    the test images were never published. In that case choose the checkpoint by step (training.test=last): the best
    checkpoint on these images is biased. `image_shards` suits network file systems better.

    Args:
        path: the folder that holds train/ and val/.
        augmentation: options of `Augmentation`; null takes its defaults, random crops and mirroring.
        others: see `EncodedImages`.

    Raises:
        FileNotFoundError: no such folder, or it lacks train/, val/ or the list.
        ValueError: a class without an image, or a list that does not fit.
    """

    name, no_augmentation = "imagenet", {}
    crop_ratio: float = 0.875
    validation_fraction: float = 0.0


@DATASETS.register("tiny_imagenet")
@dataclass(kw_only=True, eq=False, repr=False)
class TinyImageNet(_OfficialLayout):
    """Classify Tiny-ImageNet from its folder or archive (`tiny-imagenet-200.zip`).

    The layout is train/<wnid>/images/*.JPEG, val/images/*.JPEG with val/val_annotations.txt (file, wnid and a box per
    line), and test/images/ without labels; or val/<wnid>/*.JPEG, of any image size. The validation images are the
    "test" split here, since the test images have no labels; "validation" is dealt from the training images, so that a
    checkpoint is chosen and reported on different images. With `validation_fraction: 0` the validation images are both.

    Args:
        path: the folder or archive.
        image_size: height and width of an input in pixels, 64 as published.
        others, errors: see `ImageNet`.
    """

    name = "tiny_imagenet"
    mean, std = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)  # of its 100,000 training images
    image_size: int = 64


def is_image(name: str) -> bool:
    """True for the name of an image file."""
    return PurePosixPath(name).suffix.lower() in SUFFIXES


def class_names(listing: Listing) -> list[str]:
    """Sorted names of the class folders of a listing (ValueError: fewer than two)."""
    names = listing.subfolders()
    if len(names) < 2:
        found = ", ".join(names) or "no folder"
        raise ValueError(f"{listing.root} must hold one folder for each of two or more classes; found {found}")
    return names


def refuse_foreign_classes(part: Listing, train: Listing, names: Sequence[str]) -> None:
    """Refuse classes that training does not have (ValueError)."""
    if foreign := sorted(set(part.subfolders()) - set(names)):
        raise ValueError(f"{part.root} has classes that {train.root} has not: {', '.join(foreign[:5])}")


def report_empty_classes(where: object, names: Sequence[str], empty: BadFiles) -> None:
    """Stop at classes without an image, or warn of them; both count and name them."""
    if not names:
        return
    message = f"{where}: {len(names)} of its classes have no image: {', '.join(names[:10])}"
    if empty == "stop":
        raise ValueError(f"{message}; add images, remove the folders, or set data.bad_files=skip to train without them")
    warnings.warn(f"{message}; they keep their places among the outputs", RuntimeWarning, stacklevel=2)


def read_labels(content: bytes, file: Path, images: Sequence[str], names: Sequence[str]) -> np.ndarray:
    """Label of each image from a list with an image and its class per line; further columns (boxes) are ignored.

    Args:
        content: of the list. file: its path, for messages.
        names: sorted wnids; a class in the list is a wnid or its index.

    Raises:
        ValueError: a line that names no class, an image without a line, or a line without an image.
    """
    place = {name: label for label, name in enumerate(names)} | {str(n): n for n in range(len(names))}
    listed: dict[str, int] = {}
    for n, line in enumerate(as_text(content, file).splitlines(), 1):
        image, name, *_ = [*re.split(r"[,\s]+", line.strip()), ""]
        if image in ("", "ImageId"):
            continue
        if name not in place:
            raise ValueError(f"{file}, line {n}: {name!r} is none of the {len(names)} classes of train/")
        listed[PurePosixPath(image).stem] = place[name]
    stems = [PurePosixPath(image).stem for image in images]
    for way, gone in (("lacks", {*stems} - {*listed}), ("lists too many, namely", {*listed} - {*stems})):
        if gone:
            raise ValueError(f"{file} {way} {len(gone)} of {len(images)} images: {', '.join(sorted(gone)[:5])}")
    return np.array([listed[stem] for stem in stems], dtype=np.int64)
