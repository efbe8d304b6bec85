"""ImageNet-1k ("imagenet") and Tiny-ImageNet ("tiny_imagenet") in the layouts in which they are distributed.

Sources: Russakovsky et al., "ImageNet Large Scale Visual Recognition Challenge" (arXiv:1409.0575), ILSVRC 2012, 1,000
classes; Le and Yang, "Tiny ImageNet Visual Recognition Challenge", Stanford CS 231N (2015), 200 classes at 64 x 64.
`image_shards` reads ImageNet from tar shards, which suits network file systems better. torchvision's ImageNet unpacks
every archive first, and takes the validation labels from the development kit only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from cached_lab.data.archives import Listing, as_text, open_listing, read_file
from cached_lab.registries import DATASETS

from .class_folders import LabelledFiles, ListedImages, class_names, is_image, labelled, refuse_foreign_classes

_LISTS = ("val.txt", "LOC_val_solution.csv")
_VAL = ("val", "ILSVRC2012_img_val.tar")


@DATASETS.register("imagenet")
@dataclass(kw_only=True, eq=False, repr=False)
class ImageNet(ListedImages):
    """Classify ImageNet-1k from its own layout: train/<wnid>/ or train/<wnid>.tar, and val/ with or without folders.

    The images of val/ (or ILSVRC2012_img_val.tar) are in folders by class, or side by side with a list of their classes
    beside val/: val.txt or LOC_val_solution.csv (per line a file, and its wnid or the index of the sorted wnids). They
    are the "test" split, and "validation" too unless `validation_fraction` holds training images out, since labels of
    the test images were never published. In that case choose the checkpoint by step (training.test=last): the best
    checkpoint on these images is biased.

    Args:
        path: the folder that holds train/ and val/.
        augmentation: options of `Augmentation`; null takes its defaults, random crops and mirroring.
        others: see `EncodedImages`.

    Raises:
        FileNotFoundError: no such folder, or it lacks train/, val/ or the list.
        ValueError: a class without an image, or a list that does not fit.
    """

    name, no_augmentation = "imagenet", {}
    path: str | Path
    crop_ratio: float | None = 0.875
    validation_fraction: float = 0.0

    def _find(self) -> tuple[LabelledFiles, list[str]]:
        home = Path(self.path).expanduser()
        if not (home / "train").is_dir():
            hint = "unpack ILSVRC2012_img_train.tar into it (the tars of the classes may stay packed)"
            raise FileNotFoundError(f"{home} has no folder train/ of <wnid>/ or <wnid>.tar; {hint}")
        train = Listing(home / "train", open_tars=True)
        names = class_names(train)
        if self.split == "train" or (self.split == "validation" and self.validation_fraction):
            return self._dealt_files(train, names, "validation"), names
        place = next((home / name for name in _VAL if (home / name).exists()), None)
        if place is None:
            raise FileNotFoundError(f"{home} has no folder val/ and no ILSVRC2012_img_val.tar; add one of them")
        listing = Listing(place)
        if listing.subfolders():
            refuse_foreign_classes(place, listing.subfolders(), "train/", names)
            return labelled(listing, names, None), names
        found = next((home / name for name in _LISTS if (home / name).is_file()), None)
        if found is None:
            raise FileNotFoundError(f"{place} has no class folders; list its classes in {home}/{' or '.join(_LISTS)}")
        files = [name for name in listing.names if is_image(name)]
        return LabelledFiles(listing, files, read_labels(read_file(found), found, files, names)), names


@DATASETS.register("tiny_imagenet")
@dataclass(kw_only=True, eq=False, repr=False)
class TinyImageNet(ListedImages):
    """Classify Tiny-ImageNet from its folder or archive (`tiny-imagenet-200.zip`).

    The layout is train/<wnid>/images/*.JPEG, val/images/*.JPEG with val/val_annotations.txt (file, wnid and a box per
    line), and test/images/ without labels; or val/<wnid>/*.JPEG, of any image size. The validation images are the
    "test" split here, since the test images have no labels; "validation" is dealt from the training images, so that a
    checkpoint is chosen and reported on different images. With `validation_fraction: 0` the validation images are both.

    Args:
        path: the folder or archive.
        image_size: height and width of an input in pixels, 64 as published.
        others: see `EncodedImages`.

    Raises:
        FileNotFoundError: no such path, or it lacks train/ or val/.
        ValueError: a class without an image, or files and annotations that do not match.
    """

    name = "tiny_imagenet"
    mean, std = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)  # of its 100,000 training images
    path: str | Path
    image_size: int = 64

    def _find(self) -> tuple[LabelledFiles, list[str]]:
        listing = open_listing(self.path)
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
        return LabelledFiles(val, files, read_labels(val.read(called.name), called, files, names)), shown


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
        if name not in place and image not in ("", "ImageId"):
            raise ValueError(f"{file}, line {n}: {name!r} is none of the {len(names)} classes of train/")
        listed[PurePosixPath(image).stem] = place.get(name, -1)
    stems = [PurePosixPath(image).stem for image in images]
    missing, absent = sorted(set(stems) - set(listed)), sorted(set(listed) - {*stems, "", "ImageId"})
    if missing:
        raise ValueError(f"{file} lacks {len(missing)} of {len(images)} images: {', '.join(missing[:5])}; get another")
    if absent:
        raise ValueError(f"{file} lists {len(absent)} images that do not exist: {', '.join(absent[:5])}; fetch them")
    return np.array([listed[stem] for stem in stems], dtype=np.int64)
