"""Tiny-ImageNet ("tiny_imagenet"): 200 classes of ImageNet at 64 x 64 pixels.

Source: Le and Yang, "Tiny ImageNet Visual Recognition Challenge", Stanford CS 231N (2015). The layout of its archive is
train/<wnid>/images/*.JPEG, val/images/*.JPEG with val/val_annotations.txt (file, wnid and a box on each line), and
test/images/ without labels. Packs that have val/<wnid>/*.JPEG, of any image size, are read as well. torchvision has no
reader of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from cached_lab.data.archives import Listing, as_text, open_listing
from cached_lab.registries import DATASETS

from .class_folders import LabelledFiles, ListedImages, is_image, labelled


@DATASETS.register("tiny_imagenet")
@dataclass(kw_only=True, eq=False, repr=False)
class TinyImageNet(ListedImages):
    """Classify Tiny-ImageNet from its folder or archive (`tiny-imagenet-200.zip`), or from a pack of smaller images.

    Its own validation images are the "test" split here, since those that it calls test have no labels; "validation" is
    dealt from the training images, so that choosing a checkpoint and reporting it are done on different images. With
    `validation_fraction: 0` its validation images are both.

    Args:
        path: the folder or archive; a folder that holds nothing but one archive will do.
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
        if self.split == "test" or (self.split == "validation" and self.validation_fraction == 0):
            return _validation(val, names), _words(listing, names)
        return self._dealt_files(train, names, "validation"), _words(listing, names)


def _validation(val: Listing, names: list[str]) -> LabelledFiles:
    annotations = "val_annotations.txt"
    if annotations not in val:
        return labelled(val, names, None)
    place = {name: label for label, name in enumerate(names)}
    labels: dict[str, int] = {}
    listed = as_text(val.read(annotations), val.root / annotations)
    for number, line in enumerate(listed.splitlines(), 1):
        parts = line.split("\t") if "\t" in line else line.split()
        if not parts:
            continue
        if len(parts) < 2 or parts[1] not in place:
            raise ValueError(f"{val.root / annotations}, line {number}: {line!r} names no class of train/")
        labels[parts[0]] = place[parts[1]]
    files = [name for name in val.names if is_image(name)]
    found = {PurePosixPath(file).name for file in files}
    for what, missing in (("no file for", set(labels) - found), ("no annotation for", found - set(labels))):
        if missing:
            named = ", ".join(sorted(missing)[:5])
            raise ValueError(f"{val.root} has {what} {len(missing)} images ({named}); fetch it again")
    return LabelledFiles(val, files, np.array([labels[PurePosixPath(file).name] for file in files], dtype=np.int64))


def _words(listing: Listing, names: list[str]) -> list[str]:
    """First word of each class from words.txt (wnid, tab, words); the wnid where there is none."""
    if "words.txt" not in listing:
        return names
    lines = listing.read("words.txt").decode("utf-8", "replace").splitlines()
    words = {wnid: text.split(",")[0].strip() for wnid, _, text in (line.partition("\t") for line in lines)}
    return [words.get(name) or name for name in names]
