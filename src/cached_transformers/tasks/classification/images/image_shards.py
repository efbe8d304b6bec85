"""Image files in tar shards ("image_shards"): the webdataset layout, and one tar for each class, as ImageNet-22k comes.

In the webdataset layout (github.com/webdataset/webdataset) the members of one example stand together and share their
name up to the first dot: `0001.jpg`, `0001.cls`. Every shard is indexed once (`packed.py`); examples are then read in
any order by offset, so data order, resume and workers are those of every other data set. The index holds numbers alone:
fourteen million images take some 350 MB.
"""

from __future__ import annotations

import json
import re
import tarfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from cached_transformers.data.base import SPLIT_WORDS, check_fraction, check_split, items_of_split
from cached_transformers.data.decoding import SUFFIXES
from cached_transformers.data.store import Arrays, load_or_build
from cached_transformers.registry import DATASETS

from .base import BadFiles, EncodedImages, check_view
from .image_folder import report_empty_classes
from .packed import identity, read_at, tar_index

ShardPath = str | Path | Mapping[str, str | Path]


@DATASETS.register("image_shards")
class ImageShards(EncodedImages):
    """Classify images in tar shards, with a label beside each image (.cls, .json), or one tar for each class.

    Shards belong to the split that their name or folder says (`imagenet-train-000000.tar`, `val/000000.tar`), or the
    one that `path` gives them. Where nothing says so, images are dealt out by `validation_fraction` and
    `test_fraction`; shards for validation alone are used for test, too, and the other way round, when no fraction is
    given.

    Args:
        split: "train", "validation" or "test".
        path: a folder, a pattern such as /data/shard-{000000..001281}.tar, or a mapping from split to one of these.
        label: what tells the class: "cls" (a member with a number), "json:KEY" (a number in a JSON member), or "tar"
            (the name of the tar, in alphabetical order of the training shards).
        classes: their number; null takes the largest label of the training shards and one.
        image_size: height and width of an input in pixels.
        augmentation: options of `Augmentation`; null crops at random and mirrors.
        crop_ratio, interpolation: of evaluation; see `ImageFolder`.
        validation_fraction, test_fraction: shares of every class held out from the training shards; a tenth each where
            there are no other shards and neither is given, else null is none.
        seed: decides which.
        bad_files: "stop" at an image that cannot be decoded, an example without image or label, and a class without an
            image; or "skip" them.

    Raises:
        FileNotFoundError: no such folder, shards missing from a pattern (named), or none for the split.
        ValueError: a shard that is damaged or cut short, or labels that are missing, no numbers or out of range.
    """

    def __init__(
        self,
        split: str,
        *,
        path: ShardPath,
        label: str = "cls",
        classes: int | None = None,
        image_size: int = 224,
        augmentation: Mapping[str, Any] | None = None,
        crop_ratio: float | None = 0.875,
        interpolation: str = "bicubic",
        validation_fraction: float | None = None,
        test_fraction: float | None = None,
        seed: int = 0,
        bad_files: BadFiles = "stop",
    ) -> None:
        check_view(image_size, 3, crop_ratio, interpolation, bad_files)
        if label not in ("cls", "tar") and not re.fullmatch(r"json:\w+", label):
            raise ValueError(f"label={label!r} must be cls, tar, or json:KEY, e.g. json:label")
        shards = shards_of_splits(path)
        if not shards["train"]:
            raise FileNotFoundError(f"{path} has no shard for training; found {_counts(shards)}")
        fractions = _fractions(shards, {"validation": validation_fraction, "test": test_fraction})
        # Without a test split of their own, data with validation shards report on these; and the other way round.
        instead = {"validation": "test", "test": "validation"}.get(check_split(split), "")
        source = split if shards[split] else "train" if fractions.get(split) else instead
        if not shards[source]:
            raise ValueError(
                f"{path} has no shard for {split}, and no share of training; set data.{split}_fraction=0.1"
            )
        tars = sorted(shard.name.removesuffix(".tar") for shard in shards["train"]) if label == "tar" else []
        train = _Index(shards["train"], label, tars, bad_files)
        index = train if source == "train" else _Index(shards[source], label, tars, bad_files)
        number = len(tars) or classes or int(train.labels.max()) + 1
        for part in (train, index):
            part.check_labels(number)
        if train is index and split == "train":
            empty = np.flatnonzero(np.bincount(train.labels, minlength=number) == 0)
            report_empty_classes(train.shards[0].parent, [tars[i] if tars else str(i) for i in empty], bad_files)
        if source == "train" and any(fractions.values()):
            index = train.only(items_of_split(path, train.labels, fractions, seed, split))
        self._index = index
        super().__init__(
            "image_shards",
            split,
            index.labels,
            class_names=tars or [f"class {place}" for place in range(number)],
            image_size=image_size,
            augment=True,
            augmentation={} if augmentation is None else augmentation,
            crop_ratio=crop_ratio,
            interpolation=interpolation,
            bad_files=bad_files,
        )

    def encoded(self, index: int) -> tuple[bytes, object]:
        return self._index.read(index), _Name(self._index, index)


class _Name:
    """Shard and member of an example, looked up only if it must be told."""

    def __init__(self, index: _Index, place: int) -> None:
        self._index, self._place = index, place

    def __str__(self) -> str:
        return self._index.name(self._place)


class _Index:
    """Where the images of some shards lie, and their labels; numbers alone."""

    def __init__(self, shards: Sequence[Path], label: str, tars: Sequence[str], bad_files: BadFiles) -> None:
        self.shards = list(shards)
        parts = []
        place = {name: number for number, name in enumerate(tars)}
        for number, shard in enumerate(self.shards):
            if label == "tar":
                kept = _class_tar(shard)
                name = shard.name.removesuffix(".tar")
                if name not in place:
                    raise ValueError(f"{shard}: the training shards have no class {name!r}")
                kept["labels"] = np.full(len(kept["offsets"]), place[name], dtype=np.int64)
            else:
                key = {**identity(shard), "label": label}
                kept = load_or_build("shard-index", key, lambda shard=shard: _examples(shard, label))  # type: ignore[misc]
                _report_missing(shard, kept["missing"].tobytes().decode("utf-8"), bad_files)
            parts.append((np.full(len(kept["offsets"]), number, dtype=np.int32), kept))
        self._shard = np.concatenate([shard for shard, _ in parts])
        self._offset, self._size, self.labels = (
            np.concatenate([kept[name] for _, kept in parts]) for name in ("offsets", "sizes", "labels")
        )
        if not len(self.labels):
            raise ValueError(f"{self.shards[0]} and {len(self.shards) - 1} other shards hold no image")

    def only(self, chosen: np.ndarray) -> _Index:
        """The same shards with some of their images."""
        other = object.__new__(_Index)
        other.shards = self.shards
        other._shard, other._offset, other._size, other.labels = (
            array[chosen] for array in (self._shard, self._offset, self._size, self.labels)
        )
        return other

    def read(self, place: int) -> bytes:
        return read_at(self.shards[self._shard[place]], int(self._offset[place]), int(self._size[place]))

    def name(self, place: int) -> str:
        shard, offset = self.shards[self._shard[place]], int(self._offset[place])
        try:
            header = tarfile.TarInfo.frombuf(read_at(shard, offset - 512, 512), "utf-8", "surrogateescape")
        except (tarfile.TarError, OSError):
            return f"{shard}, byte {offset}"
        return f"{shard}:{header.name}"

    def check_labels(self, classes: int) -> None:
        """Refuse labels outside 0..classes - 1 (ValueError)."""
        bad = np.flatnonzero((self.labels < 0) | (self.labels >= classes))
        if len(bad):
            message = f"{self.name(int(bad[0]))}: label {self.labels[bad[0]]} must lie in 0..{classes - 1}"
            raise ValueError(f"{message} ({len(bad)} such images); set data.classes to their number")


def shards_of_splits(path: ShardPath) -> dict[str, list[Path]]:
    """The shards of each split, sorted.

    Raises:
        FileNotFoundError: a folder, or shards of a pattern, that do not exist.
        ValueError: a key that is no split.
    """
    if isinstance(path, Mapping):
        for key in path:
            check_split(str(key))
        return {split: find_shards(path[split]) if split in path else [] for split in SPLIT_WORDS}
    found: dict[str, list[Path]] = {split: [] for split in SPLIT_WORDS}
    root = Path(path).expanduser()
    for shard in find_shards(path):
        own = shard.relative_to(root).as_posix() if root.is_dir() else shard.name
        found[_split_of(own) or "train"].append(shard)
    return found


def find_shards(path: str | Path) -> list[Path]:
    """The tars below a folder, or those of a pattern with {first..last}.

    Raises:
        FileNotFoundError: see `shards_of_splits`.
    """
    text = str(Path(path).expanduser())
    braces = re.search(r"\{(\d+)\.\.(\d+)\}", text)
    if braces:
        first, last = braces.groups()
        numbers = range(int(first), int(last) + 1)
        shards = [Path(text.replace(braces.group(), str(number).zfill(len(first)))) for number in numbers]
    elif Path(text).is_dir():
        shards = sorted(file for file in Path(text).rglob("*.tar") if not file.name.startswith("."))
    else:
        shards = [Path(text)]
    missing = [shard for shard in shards if not shard.is_file()]
    if missing or not shards:
        named = ", ".join(str(shard) for shard in missing[:3]) or f"no .tar in {text}"
        raise FileNotFoundError(f"{len(missing)} of {len(shards)} shards do not exist: {named}")
    return shards


def _split_of(name: str) -> str | None:
    *folders, file = PurePosixPath(name).parts
    for split, words in SPLIT_WORDS.items():
        pattern = rf"(.*[._-])?({'|'.join(words)})([._-].*)?"
        if re.fullmatch(pattern, file.removesuffix(".tar"), re.IGNORECASE) or any(f.lower() in words for f in folders):
            return split
    return None


def _fractions(shards: Mapping[str, list[Path]], given: Mapping[str, float | None]) -> dict[str, float]:
    """Shares that are held out from the training shards."""
    nothing_said = not shards["validation"] and not shards["test"] and all(share is None for share in given.values())
    fractions = {}
    for split, share in given.items():
        if share is None:
            share = 0.1 if nothing_said else 0.0
        elif share and shards[split]:
            raise ValueError(f"{split}_fraction={share}: there are shards for {split}; leave the fraction out")
        fractions[split] = check_fraction(f"{split}_fraction", share)
    return fractions


def _class_tar(shard: Path) -> Arrays:
    index = tar_index(shard)
    images = [place for place, name in enumerate(index.names) if PurePosixPath(name).suffix.lower() in SUFFIXES]
    return {"offsets": index.offsets[images], "sizes": index.sizes[images]}


def _examples(shard: Path, label: str) -> Arrays:
    """Offset, size and label of each image of a shard; "missing": examples without image or label, a line each."""
    index = tar_index(shard)
    wanted, _, key = label.partition(":")
    images: dict[str, int] = {}
    labels: dict[str, int] = {}
    kinds: set[str] = set()
    for place, name in enumerate(index.names):
        folder, _, file = name.rpartition("/")
        stem, _, extension = file.partition(".")
        example = f"{folder}/{stem}".lstrip("/")
        kinds.add(extension)
        if f".{extension.lower()}" in SUFFIXES:
            images[example] = place
        elif extension == wanted:
            content = read_at(shard, int(index.offsets[place]), int(index.sizes[place]))
            labels[example] = _label(content, key, f"{shard}:{name}")
    if images and not labels:
        found = ", ".join(sorted(kinds))
        raise ValueError(f"{shard} has no .{wanted} members, only {found}; set data.label to cls, json:KEY or tar")
    both = [example for example in images if example in labels]
    places = [images[example] for example in both]
    missing = [
        *(f"{e} (no label)" for e in images if e not in labels),
        *(f"{e} (no image)" for e in labels if e not in images),
    ]
    return {
        "offsets": index.offsets[places],
        "sizes": index.sizes[places],
        "labels": np.array([labels[example] for example in both], dtype=np.int64),
        "missing": np.frombuffer("\n".join(missing).encode("utf-8"), dtype=np.uint8),
    }


def _label(content: bytes, key: str, name: str) -> int:
    try:
        value = json.loads(content)[key] if key else int(content)
        if isinstance(value, bool) or int(value) != value:
            raise ValueError(f"{value!r} is no whole number")
        return int(value)
    except (ValueError, KeyError, TypeError) as error:
        wanted = f"JSON with a whole number under {key!r}" if key else "a whole number"
        raise ValueError(f"{name} must hold {wanted}, not {content[:40]!r} ({error})") from None


def _report_missing(shard: Path, missing: str, bad_files: BadFiles) -> None:
    if not missing:
        return
    examples = missing.split("\n")
    message = f"{shard}: {len(examples)} examples are not whole: {', '.join(examples[:5])}"
    if bad_files == "stop":
        raise ValueError(f"{message}; make the shard again, or set data.bad_files=skip")
    warnings.warn(f"{message}; they are left out", RuntimeWarning, stacklevel=2)


def _counts(shards: Mapping[str, list[Path]]) -> str:
    return ", ".join(f"{len(found)} for {split}" for split, found in shards.items())
