"""ImageNet-1k as it is distributed ("imagenet"): ILSVRC 2012, 1,000 classes.

Source: Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge" (arXiv:1409.0575). `image_shards` reads
the same images, and those of ImageNet-22k, from tar shards, which suits network file systems better.

Why not torchvision's ImageNet: it unpacks every archive first, and takes the classes of the validation images from the
development kit alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from cached_lab.data.archives import Listing, as_text, read_file
from cached_lab.registries import DATASETS

from .class_folders import LabelledFiles, ListedImages, class_names, is_image, labelled, refuse_foreign_classes
from .dataset import AUGMENTATION_DEFAULTS

_HOMES = ("", "Data/CLS-LOC", "ILSVRC/Data/CLS-LOC")
_LISTS = (
    "val.txt",
    "val_annotations.txt",
    "LOC_val_solution.csv",
    "imagenet_2012_validation_synset_labels.txt",
    "synset_labels.txt",
)
_VAL = ("val", "validation", "ILSVRC2012_img_val")


@DATASETS.register("imagenet")
@dataclass(kw_only=True, eq=False, repr=False)
class ImageNet(ListedImages):
    """Classify ImageNet-1k from its own layout: train/<wnid>/ or train/<wnid>.tar, and val/ with or without folders.

    The images of val/ (or ILSVRC2012_img_val.tar) stand in folders by class, or side by side with a list of their
    classes in the root folder: val.txt or LOC_val_solution.csv (file and wnid, or file and index of the sorted wnids,
    on each line), or one wnid a line in the order of the files. They are the "test" split, and "validation" too unless
    `validation_fraction` holds training images out: labels of the test images were never published. Choose the
    checkpoint by step then (training.test=last), since the best on these images is biased.

    Args:
        path: the folder that holds train/ and val/.
        augmentation: options of `Augmentation`; null crops at random and mirrors, as its defaults are.
        validation_list: a list of the classes of val/, where it lies elsewhere or is named otherwise.
        others: see `EncodedImages`.

    Raises:
        FileNotFoundError: no such folder, or it lacks train/, val/ or the list.
        ValueError: a class without an image, or a list that does not fit.
    """

    name = "imagenet"
    no_augmentation = AUGMENTATION_DEFAULTS
    path: str | Path
    crop_ratio: float | None = 0.875
    validation_list: str | Path | None = None
    validation_fraction: float = 0.0

    def _find(self) -> tuple[LabelledFiles, list[str]]:
        root = Path(self.path).expanduser()
        home = next((root / home for home in _HOMES if (root / home / "train").is_dir()), None)
        if home is None:
            hint = "unpack ILSVRC2012_img_train.tar into it (the tars of the classes may stay packed)"
            raise FileNotFoundError(f"{root} has no folder train/ of <wnid>/ or <wnid>.tar; {hint}")
        train = Listing(home / "train", open_tars=True)
        names = class_names(train)
        if self.split == "test" or (self.split == "validation" and self.validation_fraction == 0):
            return _validation(root, home, names, self.validation_list), names
        return self._dealt_files(train, names, "validation"), names


def _validation(root: Path, home: Path, names: list[str], given: str | Path | None) -> LabelledFiles:
    """The images of val/ with their labels."""
    places = [home / f"{name}{suffix}" for name in _VAL for suffix in ("", ".tar")]
    place = next((place for place in places if place.exists()), None)
    if place is None:
        raise FileNotFoundError(f"{home} has no folder val/ and no ILSVRC2012_img_val.tar; add one of them")
    listing = Listing(place, open_tars=place.is_dir())
    if given is None and listing.subfolders():
        refuse_foreign_classes(place, listing.subfolders(), "train/", names)
        return labelled(listing, names, None)
    files = [name for name in listing.names if is_image(name)]
    lists = [Path(given).expanduser()] if given is not None else [f / n for f in (root, home, place) for n in _LISTS]
    found = next((file for file in lists if file.is_file()), None)
    if found is None:
        wanted = lists[0] if given is not None else f"{root}/{', '.join(_LISTS)}"
        raise FileNotFoundError(f"{place} has no class folders, and there is no list of its classes: {wanted}")
    return LabelledFiles(listing, files, read_labels(found, files, names))


def read_labels(file: Path, images: Sequence[str], names: Sequence[str]) -> np.ndarray:
    """Label of each image from a list: "image class" on each line, or one class a line in the order of the images.

    A class is a wnid or, beside an image, its place among the sorted wnids. What follows it (boxes) is ignored.

    Raises:
        ValueError: a line that names no class; images without a line; or numbers alone, which may be of another order.
    """
    place = {name: label for label, name in enumerate(names)}
    lines = [re.split(r"[,\s]+", line.strip()) for line in as_text(read_file(file), file).splitlines()]
    rows = [(n, line) for n, line in enumerate(lines, 1) if line != [""] and line[0] != "ImageId"]
    if rows and all(len(line) == 1 for _, line in rows):
        if rows[0][1][0].isdigit():
            raise ValueError(
                f"{file} holds numbers alone, which the development kit counts in an order of its own; "
                "give a list of wnids, or of images with their classes"
            )
        if len(rows) != len(images):
            raise ValueError(f"{file} names the classes of {len(rows)} images, but there are {len(images)}")
        return np.array([_label(file, n, line[0], place) for n, line in rows], dtype=np.int64)
    listed: dict[str, int] = {}
    for n, line in rows:
        if len(line) < 2:
            raise ValueError(f"{file}, line {n}: expected an image and its class, found {line[0]!r}")
        listed[PurePosixPath(line[0]).stem] = _label(file, n, line[1], place)
    missing = [image for image in images if PurePosixPath(image).stem not in listed]
    if missing:
        raise ValueError(f"{file} lacks {len(missing)} of {len(images)} images: {', '.join(missing[:5])}")
    return np.array([listed[PurePosixPath(image).stem] for image in images], dtype=np.int64)


def _label(file: Path, line: int, text: str, place: Mapping[str, int]) -> int:
    label = int(text) if text.isdecimal() and len(text) < 10 else place.get(text, -1)
    if not 0 <= label < len(place):
        raise ValueError(f"{file}, line {line}: {text!r} is none of the {len(place)} classes of train/")
    return label
