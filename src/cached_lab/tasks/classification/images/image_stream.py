"""Images in tar shards that are read once, from beginning to end ("image_stream"), for data that exceed a disk.

Only training data are a stream; validation and test are local shards, indexed as in `image_shards`. A training shard is
a file in the webdataset layout, or the output of a program: `pipe:curl -sf https://host/train-{000000..001281}.tar`.
Programs are started without a shell, and only if the environment sets `CACHED_TRANSFORMERS_PROGRAMS=1`, since a recipe
from another person could name one. A position in a shard is the number of examples before it.

webdataset shuffles in a buffer that no checkpoint holds, in an order that depends on the number of workers, so that a
run cannot be resumed in its middle (seen with 1.0.2).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np
from torch import Tensor

from cached_lab.data.archives import naming, refuse_special, regular_files
from cached_lab.data.dataset import LabelledDataset
from cached_lab.data.samples import Sample
from cached_lab.data.shard_order import Dealer
from cached_lab.registries import DATASETS

from .class_folders import is_image
from .dataset import AUGMENTATION_DEFAULTS, EncodedImages
from .image_shards import (
    MOST_CLASSES,
    IndexedExamples,
    ShardPath,
    example_name,
    expanded,
    find_shards,
    index_shards,
    read_label,
    shards_of_splits,
)

PIPE = "pipe:"
ALLOWED = "CACHED_TRANSFORMERS_PROGRAMS"
"""Variable of the environment that lets programs write shards."""


@DATASETS.register("image_stream")
@dataclass(kw_only=True, eq=False, repr=False)
class ImageStream(EncodedImages):
    """Classify images in tar shards in the webdataset layout, which training reads one after the other and never keeps.

    A stopped run resumes bitwise in the middle of a shard. Shards belong to splits as in `image_shards`; shards for
    validation only are also used for test, and vice versa.

    Args:
        path: a folder, a pattern such as /data/train-{000000..001281}.tar, or a mapping from split to one of these;
            for training also pipe:PROGRAM ARGUMENTS, which writes a shard.
        classes: their number.
        label: source of the class: "cls" (a member with a number) or "json:KEY" (a number in a JSON member).
        augmentation: options of `Augmentation`; null crops at random and mirrors.
        window: images that are permuted together, and held in memory (as files).
        parts: shares of the shards, each for equally many rows of a batch. A process reads the parts of its rows: with
            one part every process reads all shards.
        bad_files: also applies to an example without image or label, which is not counted. Another row of the batch
            replaces a training image that cannot be decoded.
        validation_fraction: has no effect.
        others: see `EncodedImages`.

    Raises:
        FileNotFoundError: no such folder, shards missing from a pattern (named), or none for the split.
        ValueError: an option out of range, more parts than shards, or programs without permission; while reading, a
            damaged or truncated shard, or labels that are missing, no numbers or out of range.
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
            Dealer(self.examples, 0, self.parts, self.window)  # checks the options before training
            return np.zeros(0, dtype=np.int64), names
        self._examples = self._held()
        self._examples.check_labels(self.classes)
        return self._examples.label, names

    def _training(self) -> list[str]:
        """Names of the training shards, files or programs."""
        path = self.path.get("train") if isinstance(self.path, Mapping) else self.path
        if str(path).startswith(PIPE):
            return expanded(str(path))
        shards: list[Path] = []
        if not isinstance(self.path, Mapping):
            shards = shards_of_splits(self.path)["train"]
        elif path is not None:
            shards = find_shards(path)
        if not shards:
            raise FileNotFoundError(f"{self.path} has no shard for training")
        return [str(shard) for shard in shards]

    def _held(self) -> IndexedExamples:
        """The images of validation, or of test."""
        path = self.path
        if isinstance(path, Mapping):
            path = {split: place for split, place in path.items() if split != "train"}
        for split, place in path.items() if isinstance(path, Mapping) else [("all splits", path)]:
            if str(place).startswith(PIPE):
                raise ValueError(
                    f"data.path: {place} for {split}: scored data are read again and again; give local shards of "
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
        """Number of training shards."""
        return len(self.examples.names)

    def __len__(self) -> int:
        if self.streamed:
            raise ValueError(f"split {self.split!r} of {self.name!r} is a stream, which has no length; take validation")
        return super().__len__()

    def __getitem__(self, index: Any) -> tuple[Tensor, int]:
        """An item by its number, or the input of an example of the stream."""
        if isinstance(index, StreamedExample):
            return self._input(index), index.label  # type: ignore[arg-type]  # passed to `encoded`
        return super().__getitem__(index)

    def encoded(self, index: Any) -> tuple[bytes, object]:
        if isinstance(index, StreamedExample):
            return index.content, index.name
        return self._examples.read(index), self._examples.file(index)

    def describe(self) -> dict[str, object]:
        if not self.streamed:
            return super().describe()
        names = ("name", "split", "shards", "classes", "image_size", "channels", "mean", "std", "class_names")
        facts = {name: getattr(self, name) for name in names}
        return {**facts, "mean": list(self.mean or ()), "std": list(self.std or ())}

    def samples(self) -> Iterator[Sample]:
        """For a stream, the names of its shards."""
        if self.streamed:
            yield json.dumps(list(self.examples.names)).encode("utf-8", "surrogateescape")
        else:
            yield from super().samples()

    def baselines(self, train: LabelledDataset) -> dict[str, float]:
        """Empty: the labels of a stream are not counted."""
        return {}


class StreamedExample(NamedTuple):
    """One image file with its label; `name` is its name in errors."""

    content: bytes
    label: int
    name: str


class TarStreams:
    """The examples of some shards, in an order made by `data/shard_order.py`.

    Args:
        names: paths, or programs after "pipe:". label: "cls" or "json:KEY". classes: number of labels.
        skip: skip examples without image or label instead of raising an error.

    Raises:
        ValueError: programs without permission; while reading, a damaged or truncated shard, a program that fails, an
            incomplete example, or a label outside the classes.
    """

    def __init__(self, names: Sequence[str], label: str, classes: int, skip: bool) -> None:
        self.names, self.label, self.classes, self.skip = names, label, classes, skip
        programs = [name for name in names if name.startswith(PIPE)]
        if programs and os.environ.get(ALLOWED) != "1":
            raise ValueError(
                f"data.path starts a program ({programs[0]}); if that is what you want, set {ALLOWED}=1 in the "
                "environment, or give local files"
            )

    def read(self, shard: int, place: int | None = None) -> TarReader:
        return TarReader(self, self.names[shard], place or 0)


class TarReader(Iterator[StreamedExample]):
    """The examples of one shard from a position on."""

    def __init__(self, shards: TarStreams, name: str, place: int) -> None:
        self._shards, self._name, self._place = shards, name, 0
        self._program: subprocess.Popen[bytes] | None = None
        with naming(name, "shard"):
            if name.startswith(PIPE):
                words = shlex.split(name.removeprefix(PIPE))
                self._program = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
                assert self._program.stdout is not None
                self._file: IO[bytes] = self._program.stdout
            else:
                refuse_special(Path(name))
                self._file = open(name, "rb")  # noqa: SIM115  # read on in __next__
            mode: Literal["r:", "r|"] = "r:" if self._program is None else "r|"
            self._archive = tarfile.open(fileobj=self._file, mode=mode)  # noqa: SIM115
            self._coming = (info for info in regular_files(self._archive) if info.isfile())
            self._next = self._header()
            while self._place < place:
                if self._next is None:
                    raise ValueError(f"it has {self._place} examples, and had {place}")
                self._members(read=False)

    def __next__(self) -> StreamedExample:
        while self._next is not None:
            with naming(self._name, "shard"):
                stem, files = self._members(read=True)
            found = self._example(f"{self._name}:{stem}", files)
            if found is not None:
                return found
        raise StopIteration

    def place(self) -> int:
        return self._place

    def _members(self, read: bool) -> tuple[str, dict[str, bytes]]:
        """Pass the members of the next example; return its name, and their content by kind if `read`."""
        assert self._next is not None
        stem, files = example_name(self._next.name)[0], {}
        while self._next is not None and example_name(self._next.name)[0] == stem:
            kind = example_name(self._next.name)[1]
            if read and (is_image(f"_.{kind}") or kind == self._shards.label.partition(":")[0]):
                file = self._archive.extractfile(self._next)
                files[kind] = b"" if file is None else file.read()
                if len(files[kind]) < self._next.size:
                    raise ValueError(f"it ends within {self._next.name}")
            self._next = self._header()
        self._place += 1
        return stem, files

    def _example(self, name: str, files: Mapping[str, bytes]) -> StreamedExample | None:
        """The example of some members; None for an incomplete one that may be skipped."""
        wanted, _, key = self._shards.label.partition(":")
        images = [content for kind, content in files.items() if kind != wanted]
        if not images or wanted not in files:
            if self._shards.skip:
                return None
            lacks = f".{wanted} member" if images else "image"
            raise ValueError(f"{name} has no {lacks}; make the shard again, or set data.bad_files=skip or data.label")
        label, most = read_label(files[wanted], key, f"{name}.{wanted}"), self._shards.classes - 1
        if not 0 <= label <= most:
            raise ValueError(f"{name}: label {label} must lie in 0..{most}; set data.classes to their number")
        return StreamedExample(images[-1], label, name)

    def _header(self) -> tarfile.TarInfo | None:
        """The next member; None at the end of a complete shard (ValueError: a truncated shard)."""
        if (found := next(self._coming, None)) is not None:
            return found
        if self._program is None:
            self._file.seek(self._archive.offset)
            if self._file.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
                raise ValueError("it ends without the mark that ends an archive")
            self._file.close()
            return None
        while self._file.read(1 << 16):
            pass
        if status := self._program.wait():
            raise ValueError(f"the program ended with status {status}")
        return None

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # not opened at all
            self._file.close()
            if self._program is not None and self._program.poll() is None:
                self._program.kill()
                self._program.wait()
