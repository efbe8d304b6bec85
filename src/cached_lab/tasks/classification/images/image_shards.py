"""Image files in tar shards ("image_shards"): the webdataset layout, and one tar per class, as in ImageNet-22k.

In the webdataset layout (github.com/webdataset/webdataset) the members of an example share their name up to the first
dot: `0001.jpg`, `0001.cls`. Every shard is indexed once (`data/archives.py`); examples are then read by offset, so that
data order, resume and workers are those of every other data set. The index holds numbers only: fourteen million images
take some 350 MB.
"""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from cached_lab.data.archives import Tar, identity, read_at
from cached_lab.data.splits import SPLITS, items_of_split, named_split
from cached_lab.data.store import Arrays, load_or_build
from cached_lab.registries import DATASETS

from .class_folders import is_image, report_empty_classes
from .dataset import EncodedImages

MOST_CLASSES = 1_000_000
"""Largest number of classes, so that a damaged label does not ask for as many outputs."""


@DATASETS.register("image_shards")
@dataclass(kw_only=True, eq=False, repr=False)
class ImageShards(EncodedImages):
    """Classify images in tar shards, with a label beside each image, or one tar per class.

    Shards belong to the split in their name or folder (`imagenet-train-000000.tar`, `val/000000.tar`). Without such
    names images are dealt out by `validation_fraction` and `test_fraction`. Shards for validation only are also used
    for test, and vice versa.

    Args:
        path: a folder of shards.
        label: "cls", a member with a number beside each image; or "tar", the name of the tar, in alphabetical order of
            the training shards.
        classes: their number; null takes the largest label of the training shards plus one.
        augmentation: options of `Augmentation`; null crops at random and mirrors.
        validation_fraction, test_fraction: share of every class held out from the training shards for a split without
            shards; null is a tenth if both lack shards, else none.
        others: see `EncodedImages`.

    Raises:
        FileNotFoundError: the folder holds no shard for training.
        ValueError: a damaged or truncated shard, or labels that are missing, no numbers or out of range.
    """

    name, no_augmentation = "image_shards", {}
    path: str | Path
    label: Literal["cls", "tar"] = "cls"
    classes: int | None = None  # type: ignore[assignment]  # the option, later replaced by the number
    crop_ratio: float = 0.875
    validation_fraction: float | None = None  # type: ignore[assignment]
    test_fraction: float | None = None

    def _load(self) -> tuple[np.ndarray, list[str]]:
        shards = shards_of_splits(Path(self.path).expanduser())
        lacking = [split for split in ("validation", "test") if not shards[split]]
        usual = 0.1 if len(lacking) == 2 else 0.0
        given = {"validation": self.validation_fraction, "test": self.test_fraction}
        shares = {split: usual if (share := given[split]) is None else share for split in lacking}
        source = self.split
        if not shards[source]:
            source = "train" if shares[source] else {"validation": "test", "test": "validation"}[source]
        if not shards[source]:
            raise ValueError(f"{self.path} has no shard for {self.split}; set data.{self.split}_fraction=0.1")
        names = sorted(shard.stem for shard in shards["train"]) if self.label == "tar" else None
        train = IndexedExamples.of(shards["train"], names)
        chosen = train if source == "train" else IndexedExamples.of(shards[source], names)
        number = len(names or ()) or self.classes or int(train.label.max()) + 1
        for part in (train, chosen):
            part.check_labels(min(number, MOST_CLASSES))
        names = names or [f"class {place}" for place in range(number)]
        if self.split == "train":
            empty = np.flatnonzero(np.bincount(train.label, minlength=number) == 0)
            report_empty_classes(self.path, [names[place] for place in empty], self.bad_files)
        if source == "train" and any(shares.values()):
            dealt = items_of_split(self.path, train.label, shares, self.seed, self.split)
            chosen = IndexedExamples(train.shards, *(column[dealt] for column in train[1:]))
        self._examples = chosen
        return chosen.label, names

    def encoded(self, index: int) -> bytes:
        return self._examples.read(index)

    def file(self, index: int) -> str:
        return self._examples.file(index)


class IndexedExamples(NamedTuple):
    """Positions and labels of the images of some shards. All arrays are (images,)."""

    shards: Sequence[Path]
    shard: np.ndarray
    offset: np.ndarray
    size: np.ndarray
    label: np.ndarray

    @classmethod
    def of(cls, shards: Sequence[Path], classes: Sequence[str] | None) -> IndexedExamples:
        """Index shards; `classes` are names of shards if a shard is a class (ValueError: no image, or bad labels)."""
        columns = []
        for number, shard in enumerate(shards):
            if classes and shard.stem not in classes:
                raise ValueError(f"{shard}: the training shards have no class {shard.stem!r}")
            key = {**identity(shard), "labelled": not classes}
            found = load_or_build("shard-index", key, lambda shard=shard: _indexed(shard, not classes))  # type: ignore[misc]
            count = len(found["offsets"])
            labels = np.full(count, classes.index(shard.stem)) if classes else found["labels"]
            columns.append((np.full(count, number, dtype=np.int32), found["offsets"], found["sizes"], labels))
        examples = cls(shards, *(np.concatenate(column) for column in zip(*columns, strict=True)))
        if not len(examples.label):
            raise ValueError(f"{shards[0]} and {len(shards) - 1} other shards hold no image")
        return examples

    def read(self, place: int) -> bytes:
        """The file of one image."""
        return read_at(self.shards[self.shard[place]], int(self.offset[place]), int(self.size[place]))

    def file(self, place: int) -> str:
        """Shard and member of one image, for messages."""
        shard, offset = self.shards[self.shard[place]], int(self.offset[place])
        try:
            header = tarfile.TarInfo.frombuf(read_at(shard, offset - 512, 512), "utf-8", "surrogateescape")
        except (tarfile.TarError, OSError):
            return f"{shard}, byte {offset}"
        return f"{shard}:{header.name}"

    def check_labels(self, classes: int) -> None:
        """Refuse labels outside 0..classes - 1 (ValueError)."""
        bad = np.flatnonzero((self.label < 0) | (self.label >= classes))
        if len(bad):
            message = f"{self.file(int(bad[0]))}: label {self.label[bad[0]]} must lie in 0..{classes - 1}"
            raise ValueError(f"{message} ({len(bad)} such images); set data.classes to their number")


def shards_of_splits(root: Path) -> dict[str, list[Path]]:
    """The tars below a folder by the split in their names, sorted (FileNotFoundError: there is none)."""
    found: dict[str, list[Path]] = {split: [] for split in SPLITS}
    for shard in sorted(file for file in root.rglob("*.tar") if not file.name.startswith(".")):
        found[named_split(shard.stem, shard.relative_to(root).parts[:-1]) or "train"].append(shard)
    if not found["train"]:
        raise FileNotFoundError(f"{root} has no .tar for training")
    return found


def _indexed(shard: Path, labelled: bool) -> Arrays:
    """Offset, size and, if `labelled`, label of each image of a shard."""
    tar = Tar(shard)
    images: dict[str, int] = {}
    labels: dict[str, int] = {}
    for place, name in enumerate(tar.names):
        folder, _, file = name.rpartition("/")
        stem, _, kind = file.partition(".")
        if is_image(f"_.{kind}"):
            images[f"{folder}/{stem}" if labelled else name] = place
        elif kind == "cls":
            try:
                labels[f"{folder}/{stem}"] = int(np.int64(int(content := tar.read(place))))
            except (ValueError, OverflowError) as error:
                raise ValueError(f"{shard}:{name} must hold a number, not {content[:40]!r} ({error})") from None
    places = list(images.values())
    found = {"offsets": tar.offsets[places], "sizes": tar.sizes[places]}
    if not labelled:
        return found
    if lacking := sorted(images.keys() ^ labels.keys()):
        message = f"{shard}: {len(lacking)} examples lack an image or a .cls member: {', '.join(lacking[:5])}"
        raise ValueError(f"{message}; make the shard again, or set data.label=tar")
    return {**found, "labels": np.array([labels[example] for example in images], dtype=np.int64)}
