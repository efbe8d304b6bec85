"""Images in tar shards that are read as they come ("image_stream"): for data that do not fit a disk.

Validation and test are local shards, which are indexed and read as those of `image_shards` are. Only what is trained
on is a stream; its shards may be written by programs, as `pipe:curl -sf https://host/train-{000000..001281}.tar`.

Why not the webdataset library: its streams shuffle in a buffer that no checkpoint holds, and their order depends on the
number of workers, so that a run cannot go on from its middle (seen with 1.0.2).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from cached_lab.data.dataset import LabelledDataset
from cached_lab.data.samples import Sample
from cached_lab.data.shard_order import Dealer
from cached_lab.registries import DATASETS

from .dataset import AUGMENTATION_DEFAULTS, EncodedImages
from .image_shards import MOST_CLASSES, Examples, ShardPath, index_shards, shards_of_splits
from .tar_streams import PIPE, Example, TarStreams, shard_names


@DATASETS.register("image_stream")
@dataclass(kw_only=True, eq=False, repr=False)
class ImageStream(EncodedImages):
    """Classify images in tar shards in the webdataset layout, which training reads one after the other and never keeps.

    A run that is stopped goes on in the middle of a shard, to the bit. Shards belong to splits as those of
    `image_shards` do; those of validation alone are used for test, too, and the other way round.

    Args:
        path: a folder, a pattern such as /data/train-{000000..001281}.tar, or a mapping from split to one of these;
            of training also pipe:PROGRAM ARGUMENTS, which writes a shard.
        classes: their number, which nobody could count.
        label: what tells the class: "cls" (a member with a number) or "json:KEY" (a number in a JSON member).
        augmentation: options of `Augmentation`; null crops at random and mirrors.
        window: images that are drawn from at a time, and held in memory (as files).
        parts: shares of the shards, each for as many rows of a batch. A process reads the parts of its rows: with one
            part every process reads all shards.
        bad_files: an example without image or label counts as a bad file, too, and is not counted. Where a file of a
            training batch cannot be decoded, another row of the batch stands in for it.
        validation_fraction: without meaning here.
        others: see `EncodedImages`.

    Raises:
        FileNotFoundError: no such folder, shards missing from a pattern (named), or none for the split.
        ValueError: an option out of range, more parts than shards, programs that are not allowed; while it is read, a
            shard that is damaged or cut short, or labels that are missing, no numbers or out of range.
    """

    name = "image_stream"
    no_augmentation = AUGMENTATION_DEFAULTS
    path: ShardPath
    classes: int
    label: str = "cls"
    crop_ratio: float | None = 0.875
    window: int = 1000
    parts: int = 1

    def _load(self) -> tuple[np.ndarray, list[str]]:
        if self.label != "cls" and not re.fullmatch(r"json:\w+", self.label):
            raise ValueError(f"label={self.label!r} must be cls, or json:KEY, e.g. json:label")
        if not 1 <= self.classes <= MOST_CLASSES:
            raise ValueError(f"data.classes={self.classes} must lie in 1..{MOST_CLASSES:,}")
        self.streamed = self.split == "train"
        names = [f"class {place}" for place in range(self.classes)]
        if self.streamed:
            self.examples = TarStreams(self._training(), self.label, self.classes, self.bad_files == "skip")
            Dealer(self.examples, 0, self.parts, self.window)  # refuses now what training would
            return np.zeros(0, dtype=np.int64), names
        self._examples = self._held()
        self._examples.check_labels(self.classes)
        return self._examples.label, names

    def _training(self) -> list[str]:
        """Names of the shards to train on."""
        if isinstance(self.path, Mapping) and "train" in self.path:
            return shard_names(self.path["train"])
        if not isinstance(self.path, Mapping) and str(self.path).startswith(PIPE):
            return shard_names(self.path)
        found = shards_of_splits(self.path)["train"]
        if not found:
            raise FileNotFoundError(f"{self.path} has no shard for training")
        return [str(shard) for shard in found]

    def _held(self) -> Examples:
        """The images of validation, or of test."""
        path = self.path
        if isinstance(path, Mapping):
            path = {split: place for split, place in path.items() if split != "train"}
        for split, place in path.items() if isinstance(path, Mapping) else [("all splits", path)]:
            if str(place).startswith(PIPE):
                raise ValueError(
                    f"data.path: {place} for {split}: what is scored is read again and again; give local shards of "
                    "validation, e.g. data.path={train: 'pipe:...', validation: FOLDER}"
                )
        shards = shards_of_splits(path)
        chosen = shards[self.split] or shards[{"validation": "test", "test": "validation"}[self.split]]
        if not chosen:
            raise FileNotFoundError(
                f"{self.path} has no shard for {self.split}, and a stream deals none from training; give "
                "data.path={train: ..., validation: ...}"
            )
        return index_shards(chosen, self.label, {}, self.bad_files)

    @property
    def shards(self) -> int:
        """Number of shards to train on."""
        return len(self.examples.names)

    def __len__(self) -> int:
        if self.streamed:
            raise ValueError(f"split {self.split!r} of {self.name!r} is a stream, which has no length; take validation")
        return super().__len__()

    def __getitem__(self, index: Any) -> tuple[Tensor, int]:
        """An item by its number; or an example of the stream, read."""
        if isinstance(index, Example):
            return self._input(index), index.label  # type: ignore[arg-type]  # which only `encoded` looks at
        return super().__getitem__(index)

    def encoded(self, index: Any) -> tuple[bytes, object]:
        if isinstance(index, Example):
            return index.content, index.name
        return self._examples.read(index), self._examples.file(index)

    def describe(self) -> dict[str, object]:
        if not self.streamed:
            return super().describe()
        return {
            "name": self.name,
            "split": self.split,
            "shards": self.shards,
            "classes": self.classes,
            "image_size": self.image_size,
            "channels": self.channels,
            "mean": list(self.mean or ()),
            "std": list(self.std or ()),
            "class_names": self.class_names,
        }

    def samples(self) -> Iterator[Sample]:
        """Of a stream, how its shards are called."""
        if self.streamed:
            yield json.dumps(list(self.examples.names)).encode("utf-8", "surrogateescape")
            return
        yield from super().samples()

    def baselines(self, train: LabelledDataset) -> dict[str, float]:
        """None, as nobody has counted the labels of a stream."""
        return {}
