"""ImageNet-1k ("imagenet") and Tiny-ImageNet ("tiny_imagenet") in the layouts in which they are distributed.

Sources: Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge" (arXiv:1409.0575), ILSVRC 2012, 1,000
classes; Le and Yang, "Tiny ImageNet Visual Recognition Challenge", Stanford CS 231N (2015), 200 classes at 64 x 64.
`image_shards` reads ImageNet from tar shards, which suits network file systems better. torchvision's ImageNet unpacks
every archive first, and takes the validation labels from the development kit only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from cached_lab.data.archives import Listing, as_text, open_listing, read_file
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

    The images of val/ (or ILSVRC2012_img_val.tar) are in folders by class, or side by side with a list of their classes
    in the root folder: val.txt or LOC_val_solution.csv (per line a file, and its wnid or the index of the sorted
    wnids), or one wnid per line in the order of the files. They are the "test" split, and "validation" too unless
    `validation_fraction` holds training images out, since labels of the test images were never published. In that case
    choose the checkpoint by step (training.test=last): the best checkpoint on these images is biased.

    Args:
        path: the folder that holds train/ and val/.
        augmentation: options of `Augmentation`; null takes its defaults, random crops and mirroring.
        validation_list: a list of the classes of val/ in another place or under another name.
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
        if self.split == "train" or (self.split == "validation" and self.validation_fraction):
            return self._dealt_files(train, names, "validation"), names
        places = [home / f"{name}{suffix}" for name in _VAL for suffix in ("", ".tar")]
        place = next((place for place in places if place.exists()), None)
        if place is None:
            raise FileNotFoundError(f"{home} has no folder val/ and no ILSVRC2012_img_val.tar; add one of them")
        listing, given = Listing(place, open_tars=place.is_dir()), self.validation_list
        if given is None and listing.subfolders():
            refuse_foreign_classes(place, listing.subfolders(), "train/", names)
            return labelled(listing, names, None), names
        files = [name for name in listing.names if is_image(name)]
        lists = [Path(given).expanduser()] if given else [f / n for f in (root, home, place) for n in _LISTS]
        found = next((file for file in lists if file.is_file()), None)
        if found is None:
            wanted = lists[0] if given else f"{root}/{', '.join(_LISTS)}"
            raise FileNotFoundError(f"{place} has no class folders, and there is no list of its classes: {wanted}")
        return LabelledFiles(listing, files, read_labels(read_file(found), found, files, names)), names


@DATASETS.register("tiny_imagenet")
@dataclass(kw_only=True, eq=False, repr=False)
class TinyImageNet(ListedImages):
    """Classify Tiny-ImageNet from its folder or archive (`tiny-imagenet-200.zip`), or from a pack of smaller images.

    The layout is train/<wnid>/images/*.JPEG, val/images/*.JPEG with val/val_annotations.txt (file, wnid and a box per
    line), and test/images/ without labels; or val/<wnid>/*.JPEG, of any image size. The validation images are the
    "test" split here, since the test images have no labels; "validation" is dealt from the training images, so that a
    checkpoint is chosen and reported on different images. With `validation_fraction: 0` the validation images are both.

    Args:
        path: the folder or archive, or a folder that holds nothing but one archive.
        image_size: height and width of an input in pixels, 64 as published.
        others: see `EncodedImages`.

    Raises:
        FileNotFoundError: no such path, or it lacks train/ or val/.
        ValueError: a class without an image, an annotation that names no file, or a file without an annotation.
    """

    name = "tiny_imagenet"
    mean, std = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)  # of its 100,000 training images
    path: str | Path
    image_size: int = 64

    def _find(self) -> tuple[LabelledFiles, list[str]]:
        listing = open_listing(self.path, "a folder or archive with train/<wnid>/ and val/")
        for folder in ("train", "val"):
            if folder not in listing.folders:
                raise FileNotFoundError(f"{listing.root} has no folder {folder}/; expected train/<wnid>/ and val/")
        train, val = listing.inside("train"), listing.inside("val")
        names = train.subfolders()
        words: dict[str, str] = {}
        if "words.txt" in listing:  # per line a wnid, a tab and words, the first of which names the class
            lines = listing.read("words.txt").decode("utf-8", "replace").splitlines()
            words = {wnid: text.split(",")[0].strip() for wnid, _, text in (line.partition("\t") for line in lines)}
        shown = [words.get(name) or name for name in names]
        if self.split == "train" or (self.split == "validation" and self.validation_fraction):
            return self._dealt_files(train, names, "validation"), shown
        if "val_annotations.txt" not in val:
            return labelled(val, names, None), shown
        called = val.root / "val_annotations.txt"
        files = [name for name in val.names if is_image(name)]
        labels = read_labels(val.read(called.name), called, files, names, complete=True)
        return LabelledFiles(val, files, labels), shown


def read_labels(
    content: bytes, file: Path, images: Sequence[str], names: Sequence[str], complete: bool = False
) -> np.ndarray:
    """Label of each image from a list: "image class" per line, or one class per line in the order of the images.

    A class is a wnid or, next to an image, its index among the sorted wnids. Further columns (boxes) are ignored.

    Args:
        content: of the list. file: its path, for messages.
        complete: refuse a list with images that do not exist.

    Raises:
        ValueError: a line that names no class; images without a line; or numbers only, whose order is unknown.
    """
    place = {name: label for label, name in enumerate(names)}
    lines = [re.split(r"[,\s]+", line.strip()) for line in as_text(content, file).splitlines()]
    rows = [(n, line) for n, line in enumerate(lines, 1) if line != [""] and line[0] != "ImageId"]
    if rows and all(len(line) == 1 for _, line in rows):
        if rows[0][1][0].isdigit():
            raise ValueError(f"{file} holds only numbers, whose order is unknown; list wnids, or images with classes")
        if len(rows) != len(images):
            raise ValueError(f"{file} names the classes of {len(rows)} images, but there are {len(images)}")
        return np.array([_label(file, n, line[0], place) for n, line in rows], dtype=np.int64)
    listed: dict[str, int] = {}
    for n, line in rows:
        if len(line) < 2:
            raise ValueError(f"{file}, line {n}: expected an image and its class, found {line[0]!r}")
        listed[PurePosixPath(line[0]).stem] = _label(file, n, line[1], place)
    stems = [PurePosixPath(image).stem for image in images]
    missing = [image for image, stem in zip(images, stems, strict=True) if stem not in listed]
    if missing:
        raise ValueError(f"{file} lacks {len(missing)} of {len(images)} images: {', '.join(missing[:5])}")
    if complete and (absent := sorted(listed.keys() - set(stems))):
        raise ValueError(f"{file} lists {len(absent)} images that do not exist: {', '.join(absent[:5])}")
    return np.array([listed[stem] for stem in stems], dtype=np.int64)


def _label(file: Path, line: int, text: str, place: Mapping[str, int]) -> int:
    label = int(text) if text.isdecimal() and len(text) < 10 else place.get(text, -1)
    if not 0 <= label < len(place):
        raise ValueError(f"{file}, line {line}: {text!r} is none of the {len(place)} classes of train/")
    return label
