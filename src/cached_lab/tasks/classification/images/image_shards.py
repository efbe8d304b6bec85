"""Image files in tar shards ("image_shards"): the webdataset layout, and one tar per class, as in ImageNet-22k.

In the webdataset layout (github.com/webdataset/webdataset) the members of an example share their name up to the first
dot: `0001.jpg`, `0001.cls`. Every shard is indexed once (`data/archives.py`); examples are then read by offset, so that
data order, resume and workers are those of every other data set. The index holds numbers only: fourteen million images
take some 350 MB.

webdataset shuffles in a buffer, so that the order depends on the number of workers (seen with 1.0.2) and an epoch
cannot be resumed in its middle; it knows labels too late for stratified splits, and notices a truncated shard only when
it is read. Hugging Face `datasets` copies the shards into its own files.
"""

from __future__ import annotations

import json
import re
import tarfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cached_lab.data.archives import Tar, identity, read_at
from cached_lab.data.splits import SPLITS, items_of_split, named_split
from cached_lab.data.store import Arrays, load_or_build
from cached_lab.registries import DATASETS

from .class_folders import is_image, report_empty_classes
from .dataset import BadFiles, EncodedImages

MOST_CLASSES = 1_000_000
"""Largest number of classes, so that a damaged label does not ask for as many outputs."""


@DATASETS.register("image_shards")
@dataclass(kw_only=True, eq=False, repr=False)
class ImageShards(EncodedImages):
    """Classify images in tar shards, with a label beside each image (.cls, .json), or one tar per class.

    Shards belong to the split in their name or folder (`imagenet-train-000000.tar`, `val/000000.tar`). Without such
    names images are dealt out by `validation_fraction` and `test_fraction`. Shards for validation only are also used
    for test, and vice versa.

    Args:
        path: a folder of shards.
        label: source of the class: "cls" (a member with a number), "json:KEY" (a number in a JSON member), or "tar"
            (the name of the tar, in alphabetical order of the training shards).
        classes: their number; null takes the largest label of the training shards plus one.
        window: read training shards one after the other, for network file systems: each epoch permutes the shards, and
            the images within windows of this many. Null permutes all images.
        augmentation: options of `Augmentation`; null crops at random and mirrors.
        validation_fraction, test_fraction: share of every class held out from the training shards for a split without
            shards; null is a tenth if both lack shards, else none.
        bad_files: also applies to an example without image or label.
        others: see `EncodedImages`.

    Raises:
        FileNotFoundError: the folder holds no shard for training.
        ValueError: a damaged or truncated shard, or labels that are missing, no numbers or out of range.
    """

    name, no_augmentation = "image_shards", {}
    path: str | Path
    label: str = "cls"
    classes: int | None = None  # type: ignore[assignment]  # the option, later replaced by the number
    window: int | None = None
    crop_ratio: float | None = 0.875
    validation_fraction: float | None = None  # type: ignore[assignment]
    test_fraction: float | None = None

    def _load(self) -> tuple[np.ndarray, list[str]]:
        if self.label not in ("cls", "tar") and not re.fullmatch(r"json:\w+", self.label):
            raise ValueError(f"label={self.label!r} must be cls, tar, or json:KEY, e.g. json:label")
        if self.window is not None and self.window < 1:
            raise ValueError(f"data.window={self.window} must be at least 1 image, or null")
        shards = shards_of_splits(Path(self.path).expanduser())
        lacking = [split for split in ("validation", "test") if not shards[split]]
        usual = 0.1 if len(lacking) == 2 else 0.0
        given = {"validation": self.validation_fraction, "test": self.test_fraction}
        shares = {split: usual if given[split] is None else given[split] for split in lacking}
        source = self.split
        if not shards[source]:
            source = "train" if shares[source] else {"validation": "test", "test": "validation"}[source]
        if not shards[source]:
            raise ValueError(f"{self.path} has no shard for {self.split}; set data.{self.split}_fraction=0.1")
        classes = sorted(shard.stem for shard in shards["train"]) if self.label == "tar" else []
        train = index_shards(shards["train"], self.label, classes, self.bad_files)
        chosen = train if source == "train" else index_shards(shards[source], self.label, classes, self.bad_files)
        number = len(classes) or self.classes or int(train.label.max()) + 1
        for part in (train, chosen):
            part.check_labels(min(number, MOST_CLASSES))
        names = classes or [f"class {place}" for place in range(number)]
        if self.split == "train":
            empty = np.flatnonzero(np.bincount(train.label, minlength=number) == 0)
            report_empty_classes(train.shards[0].parent, [names[place] for place in empty], self.bad_files)
        if source == "train" and any(shares.values()):
            chosen = train.only(items_of_split(self.path, train.label, shares, self.seed, self.split))
        self._examples = chosen
        return chosen.label, names

    @property
    def shard_starts(self) -> np.ndarray:
        """Index of the first image of each shard."""
        return np.unique(self._examples.shard, return_index=True)[1]

    def encoded(self, index: int) -> bytes:
        return self._examples.read(index)

    def file(self, index: int) -> str:
        return self._examples.file(index)


class IndexedExamples(NamedTuple):
    """Positions and labels of the images of some shards. All arrays are (images,)."""

    shards: list[Path]
    shard: np.ndarray
    offset: np.ndarray
    size: np.ndarray
    label: np.ndarray

    def only(self, chosen: np.ndarray) -> IndexedExamples:
        """A subset, by index."""
        return IndexedExamples(self.shards, *(column[chosen] for column in self[1:]))

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
        folders = shard.relative_to(root).parts[:-1]
        found[named_split(shard.name.removesuffix(".tar"), folders) or "train"].append(shard)
    if not found["train"]:
        raise FileNotFoundError(f"{root} has no .tar for training")
    return found


def index_shards(shards: Sequence[Path], label: str, classes: Sequence[str], bad_files: BadFiles) -> IndexedExamples:
    """The images of some shards (ValueError: there is none); `classes` are names of shards where a shard is a class."""
    columns = []
    for number, shard in enumerate(shards):
        if label == "tar":
            found = _class_tar(shard, classes)
        else:
            key = {**identity(shard), "label": label}
            found = load_or_build("shard-index", key, lambda shard=shard: _labelled(shard, label))  # type: ignore[misc]
            if len(found["missing"]):
                missing = found["missing"].tobytes().decode("utf-8", "surrogateescape").split("\n")
                message = f"{shard}: {len(missing)} examples are not whole: {', '.join(missing[:5])}"
                if bad_files == "stop":
                    raise ValueError(f"{message}; make the shard again, or set data.bad_files=skip")
                warnings.warn(f"{message}; they are left out", RuntimeWarning, stacklevel=2)
        places = np.full(len(found["offsets"]), number, dtype=np.int32)
        columns.append((places, found["offsets"], found["sizes"], found["labels"]))
    examples = IndexedExamples(list(shards), *(np.concatenate(column) for column in zip(*columns, strict=True)))
    if not len(examples.label):
        raise ValueError(f"{shards[0]} and {len(shards) - 1} other shards hold no image")
    return examples


def _class_tar(shard: Path, classes: Sequence[str]) -> Arrays:
    tar = Tar(shard)
    if shard.stem not in classes:
        raise ValueError(f"{shard}: the training shards have no class {shard.stem!r}")
    images = [place for place, member in enumerate(tar.names) if is_image(member)]
    labels = np.full(len(images), classes.index(shard.stem), dtype=np.int64)
    return {"offsets": tar.offsets[images], "sizes": tar.sizes[images], "labels": labels}


def _labelled(shard: Path, label: str) -> Arrays:
    """Offset, size and label of each image of a shard; "missing": examples without image or label, one per line."""
    tar = Tar(shard)
    wanted, _, key = label.partition(":")
    images: dict[str, int] = {}
    labels: dict[str, int] = {}
    kinds: set[str] = set()
    for place, name in enumerate(tar.names):
        folder, _, file = name.rpartition("/")
        stem, _, kind = file.partition(".")
        example = f"{folder}/{stem}".lstrip("/")
        kinds.add(kind)
        if is_image(f"_.{kind}"):
            images[example] = place
        elif kind == wanted:
            labels[example] = read_label(tar.read(place), key, f"{shard}:{name}")
    if images and not labels:
        found = ", ".join(sorted(kinds))
        raise ValueError(f"{shard} has no .{wanted} members, only {found}; set data.label to cls, json:KEY or tar")
    both = [example for example in images if example in labels]
    places = [images[example] for example in both]
    missing = [f"{example} (no label)" for example in images if example not in labels]
    missing += [f"{example} (no image)" for example in labels if example not in images]
    return {
        "offsets": tar.offsets[places],
        "sizes": tar.sizes[places],
        "labels": np.array([labels[example] for example in both], dtype=np.int64),
        "missing": np.frombuffer("\n".join(missing).encode("utf-8", "surrogateescape"), dtype=np.uint8),
    }


def read_label(content: bytes, key: str, name: str) -> int:
    """The label in a member called `name`: an integer, or one under `key` in JSON (ValueError otherwise)."""
    try:
        value = json.loads(content)[key] if key else int(content)
        if isinstance(value, bool) or int(value) != value:
            raise ValueError(f"{value!r} is no whole number")
        if abs(value) >= 1 << 63:
            raise ValueError("it has more than 64 bits")
        return int(value)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        wanted = f"JSON with a whole number under {key!r}" if key else "a whole number"
        raise ValueError(f"{name} must hold {wanted}, not {content[:40]!r} ({error})") from None
