"""Folders (or archives) of image files, a folder for each class ("image_folder").

Why not torchvision's ImageFolder: it opens no archive, and has no splits and no rule for bad files. One listing serves
for folders and archives here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cached_lab.data.archives import Listing, open_listing
from cached_lab.data.splits import SPLIT_WORDS, SPLITS
from cached_lab.registries import DATASETS

from .class_folders import LabelledFiles, ListedImages, class_names, labelled, refuse_foreign_classes


@DATASETS.register("image_folder")
@dataclass(kw_only=True, eq=False, repr=False)
class ImageFolder(ListedImages):
    """Classify image files (.jpg, .jpeg, .png) laid out as root/<class>/ or as root/<split>/<class>/.

    Without split folders every class is dealt out by `validation_fraction` and `test_fraction`. With split folders
    (`train`, and `val` or `validation`, and `test`) these are used; when there is none for validation, it is dealt
    from `train` by `validation_fraction`. Classes are the folder names in alphabetical order. A file is decoded when
    its item is asked for, and turned as its EXIF entry says.

    Args:
        path: the root folder, or an archive of it: .tar, .zip, or a compressed tar (unpacked once, to the cache).
        channels: 3 (colour) or 1 (grey).
        mean, std: of pixels in 0..1, one number a channel; default: those of ImageNet for colour, 0.5 for grey.
        shift: greatest shift of training images in pixels. flip: mirror half of them.
        test_fraction: share of every class held out for testing where the folders do not say.
        others: see `EncodedImages`.

    Raises:
        FileNotFoundError: no such folder, or none for the split.
        ValueError: no image, fewer than two classes, a class that training does not have, or one without a training
            image.
    """

    name = "image_folder"
    path: str | Path
    channels: int = 3
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    shift: int = 4
    flip: bool = True
    test_fraction: float = 0.1

    def _find(self) -> tuple[LabelledFiles, list[str]]:
        listing = open_listing(self.path, "a folder of root/<class>/*.jpg or *.png")
        parts = {split: _part(listing, split) for split in SPLITS}
        train, part = parts["train"], parts[self.split]
        if train is None:
            names = class_names(listing)
            return self._dealt_files(listing, names, "validation", "test"), names
        names = class_names(train)
        if part is None and self.split == "test":
            present = ", ".join(sorted(found.root.name for found in parts.values() if found))
            message = f"{listing.root} has no folder for split 'test', only {present}"
            raise FileNotFoundError(f"{message}; add one, or train with training.test=none")
        if part is None or (self.split == "train" and parts["validation"] is None):
            return self._dealt_files(train, names, "validation"), names
        refuse_foreign_classes(part.root, class_names(part), train.root, names)
        return labelled(part, names, self.bad_files if self.split == "train" else None), names


def _part(listing: Listing, split: str) -> Listing | None:
    """What lies in the folder of a split, if there is one."""
    found = [name for name in listing.subfolders() if name.lower() in SPLIT_WORDS[split]]
    if len(found) > 1:
        raise ValueError(f"{listing.root} has several folders for split {split!r}: {', '.join(found)}")
    return listing.inside(found[0]) if found else None
