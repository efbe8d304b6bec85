"""Pairs of texts for translation ("translation", "multi30k", "iwslt14"): any two text files, TSV, or data of the hub.

The subwords are those of the training side alone. Multi30k: Elliott et al. (arXiv:1605.00459); IWSLT: Cettolo et al.,
"Report on the 11th IWSLT evaluation campaign" (2014). Lines that training leaves out are counted and reported;
validation and test keep every line, so that scores are of the whole split.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from cached_lab.data import subwords
from cached_lab.data.pairs import Pair, PairBatch, pad_pairs
from cached_lab.data.splits import SPLIT_WORDS, check_split
from cached_lab.data.store import Arrays, load_or_build
from cached_lab.data.subwords import BEGIN, END, PAD, UNKNOWN, PairTokenizer
from cached_lab.data.tokenizers import load_tokenizer
from cached_lab.registries import DATASETS
from cached_transformers.registry import unknown_name

from .parallel_files import PairFiles, PairPath, Parallel, find_pair, load_hub, pair_key, read_hub, read_pair

VERSION = 1  # to be raised when the same text gives other ids
Names = str | list[str] | None


@DATASETS.register("translation")
@dataclass(eq=False, repr=False)
class Translation:
    """Translate lines of text: files, TSV, archives, or a data set of the Hugging Face hub.

    A split is a name: of `train.de` and `train.en`, say, or of `train.tsv`, in a folder or archive, where anything may
    stand between it and the language, and compression behind (see `tasks.translation.parallel_files`).

    Args:
        split: "train", "validation" or "test".
        source, target: languages as files or columns are named, e.g. "en" and "de"; null takes those that the name of
            the data set implies.
        path: folder or archive; or a mapping from split to a TSV file or to [source file, target file].
        dataset: name of a data set of the hub, or of the folder that `save_to_disk` wrote, in place of `path`.
        config: its configuration.
        train, validation, test: names of the splits where they are not the usual ones; several are joined.
        tokenizer: "bpe" or "unigram", trained on the training side; or a file: a sentencepiece .model, the
            tokenizer.json of another run, or its folder.
        vocabulary_size: ids at most, of both sides together or of each.
        joint: one vocabulary for both sides.
        text_format: "raw", or "moses" for text that is tokenised with blanks between tokens; sacreBLEU is of text
            without tokenisation in either case. null: "raw", or what the name of the data set implies.
        lowercase: put everything into lower case, references too.
        max_length: tokens, the end included, beyond which training drops a pair and evaluation truncates a source.
        max_ratio: training drops pairs of which one side has more than so many times the tokens of the other; null
            keeps them. fairseq's preparation of IWSLT takes 1.5.
        limit: the first so many training pairs alone.
        multiple: lengths of a batch are rounded up to a multiple of this, so that few shapes occur.

    Attributes:
        lengths: tokens of source and target, integers (size, 2).
        tokenizer: a `PairTokenizer`. dropped: why training left out how many lines.

    Raises:
        FileNotFoundError: no such path, name or language; the message says what there is.
        ValueError: files of different length, wrong encodings (named by line), options out of range, nothing left.
        ImportError: `tokenizers`, `sentencepiece` or `datasets` is wanted and not installed.
    """

    name = "translation"
    task = "translation"
    augment = False
    standard: ClassVar[dict[str, Any]] = {}
    """What a data set of its own name has where `source`, `target`, `test` or `text_format` is null."""

    split: str
    _: KW_ONLY
    source: str | None = None
    target: str | None = None
    path: PairPath | None = None
    dataset: str | None = None
    config: str | None = None
    train: Names = None
    validation: Names = None
    test: Names = None
    tokenizer: str = "bpe"
    vocabulary_size: int = 8000
    joint: bool = True
    text_format: str | None = None
    lowercase: bool = False
    max_length: int = 256
    max_ratio: float | None = None
    limit: int | None = None
    multiple: int = 1

    def __post_init__(self) -> None:
        check_split(self.split)
        for option in ("source", "target", "test"):
            setattr(self, option, getattr(self, option) or self.standard.get(option))
        self._format: str = self.text_format or self.standard.get("text_format", "raw")
        self.text_format, self.path = self._format, self._folder(self.path)
        self._check()
        self.languages = (self.source or "", self.target or "")
        self._read: dict[str, Parallel] = {}
        self._subwords = self._tokenizer(self.tokenizer)
        self.tokenizer = self._subwords  # type: ignore[assignment]  # an option first, and then what it names
        key = {"tokenizer": self._tokenizer_key, "text": self._key(self.split), "version": VERSION}
        training = self.split == "train"
        rules = [training, self.max_length, self.max_ratio, self.limit if training else None]
        arrays = load_or_build("translation", {**key, "rules": rules}, self._encode)
        self._tokens = tuple(torch.from_numpy(arrays[side].astype(np.int64)) for side in ("source", "target"))
        self._ends = tuple(np.cumsum([0, *arrays["lengths"][:, side]]) for side in (0, 1))
        self.lengths: np.ndarray = arrays["lengths"]
        self._whole = arrays["whole"]
        reasons = ("empty", "longer than data.max_length", "beyond data.max_ratio")
        self.dropped = {why: int(n) for why, n in zip(reasons, arrays["dropped"], strict=True) if n}
        self._report()

    def _check(self) -> None:
        if (self.path is None) == (self.dataset is None):
            raise ValueError(f"data.path={self.path!r} and data.dataset={self.dataset!r}: give one of them")
        both = f"data.source={self.source!r} and data.target={self.target!r}"
        if not (self.source and self.target):
            raise ValueError(f"{both}: name both languages")
        if self.source == self.target:
            raise ValueError(f"{both} must be two languages")
        if self.text_format not in subwords.FORMATS:
            raise ValueError(unknown_name("data.text_format", self.text_format, list(subwords.FORMATS)))
        size, length = self.vocabulary_size, self.max_length
        if size < subwords.SMALLEST:
            raise ValueError(
                f"data.vocabulary_size={size} must be at least {subwords.SMALLEST}: special ids and the 256 bytes"
            )
        for name, least in (("max_length", 2), ("limit", 1), ("multiple", 1)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"data.{name}={value} must be at least {least}")
        if length % self.multiple:
            raise ValueError(f"data.max_length={length} must be a multiple of data.multiple={self.multiple}")
        if self.max_ratio is not None and self.max_ratio < 1:
            raise ValueError(f"data.max_ratio={self.max_ratio} must be at least 1, or null")

    def _folder(self, path: PairPath | None) -> PairPath | None:
        """Where the files lie under what the user gave."""
        return path

    def _names(self, split: str) -> Sequence[str]:
        """What the files of a split are called."""
        given: Names = getattr(self, split)
        return SPLIT_WORDS[split] if given is None else [given] if isinstance(given, str) else given

    def _key(self, split: str) -> Any:
        """What decides the lines of a split, as JSON."""
        sides = [*self.languages, self.lowercase]
        if self.dataset is not None:
            rows, columns = load_hub(self.dataset, self.config, split, self.languages)
            return [self.dataset, self.config, columns, len(rows), rows._fingerprint, *sides]
        return [pair_key(self._files(split)), *sides]

    def _files(self, split: str) -> list[PairFiles]:
        assert self.path is not None
        return find_pair(self.path, split, self._names(split), self.languages)

    def parallel(self, split: str) -> Parallel:
        """The lines of a split as they stand in the files (in lower case, if so), empty ones too."""
        if split not in self._read:
            if self.dataset is not None:
                parts = [read_hub(*load_hub(self.dataset, self.config, split, self.languages), self.dataset)]
            else:
                parts = [read_pair(files, self.languages) for files in self._files(split)]
            lower = str.lower if self.lowercase else str
            sides = [[lower(line) for part in parts for line in part[side]] for side in (0, 1)]
            self._read[split] = Parallel(sides[0], sides[1], "; ".join(part.name for part in parts))
        return self._read[split]

    def _tokenizer(self, kind: str) -> PairTokenizer:
        if kind not in subwords.SUBWORDS:
            if not Path(kind).expanduser().exists():
                raise ValueError(f"{unknown_name('tokenizer', kind, list(subwords.SUBWORDS))}, nor is it a file")
            found = subwords.read_pair_tokenizer(kind, self._format, self.lowercase)
            self._tokenizer_key: Any = found.dump().decode()
            return found
        size, text_format = self.vocabulary_size, self._format
        options = {"kind": kind, "size": size, "joint": self.joint, "format": text_format}
        self._tokenizer_key = {**options, "train": self._key("train"), "limit": self.limit, "version": VERSION}

        def train() -> Arrays:
            lines = self.parallel("train")
            sides = [[line for line in side[: self.limit] if line.strip()] for side in lines[:2]]
            if not all(sides):
                raise ValueError(f"{lines.name}: no training line holds text")
            texts = [[*sides[0], *sides[1]]] if self.joint else sides
            trained = [subwords.train_subwords(kind, part, size, text_format) for part in texts]
            target = None if self.joint else trained[1]
            dumped = PairTokenizer(trained[0], target, text_format, self.lowercase).dump()
            return {"tokenizer": np.frombuffer(dumped, dtype=np.uint8)}

        stored = load_or_build("subwords", self._tokenizer_key, train)
        loaded = load_tokenizer(stored["tokenizer"].tobytes())
        assert isinstance(loaded, PairTokenizer)
        return loaded

    def _encode(self) -> Arrays:
        lines, training = self.parallel(self.split), self.split == "train"
        pairs = list(zip(lines.source, lines.target, strict=True))[: self.limit if training else None]
        kept = [pair for pair in pairs if pair[0].strip() and pair[1].strip()] if training else pairs
        empty = len(pairs) - len(kept)
        sources, targets = (
            self._subwords.encode_batch([pair[side] for pair in kept], target=side == 1) for side in (0, 1)
        )
        both = list(zip(sources, targets, strict=True))
        fitting = [(s, t) for s, t in both if max(len(s), len(t)) <= self.max_length]
        whole = np.array([len(s) for s in sources], dtype=np.int64)
        long = len(both) - len(fitting)
        if not training:
            fitting = [(truncated(s, self.max_length), truncated(t, self.max_length)) for s, t in both]
            empty = long = 0
        ratio = self.max_ratio
        balanced = [(s, t) for s, t in fitting if not training or ratio is None or _balanced(s, t, ratio)]
        if not balanced:
            raise ValueError(
                f"{lines.name}: none of {len(pairs)} pairs is left ({empty} empty, {long} longer than data.max_length="
                f"{self.max_length}, {len(fitting)} beyond data.max_ratio={ratio}); raise these, or fetch the data "
                f"again"
            )
        kind = np.uint16 if max(self._subwords.vocabulary, self._subwords.target_vocabulary) <= 1 << 16 else np.int32
        flat = [np.array([i for pair in balanced for i in pair[side]], dtype=kind) for side in (0, 1)]
        lengths = np.array([[len(s), len(t)] for s, t in balanced], dtype=np.int64)
        dropped = np.array([empty, long, len(fitting) - len(balanced)], dtype=np.int64)
        return {"source": flat[0], "target": flat[1], "lengths": lengths, "dropped": dropped, "whole": whole}

    def _report(self) -> None:
        """Warn of what was left out or cannot be read."""
        for why, count in self.dropped.items():
            warnings.warn(f"{self.name}, {self.split}: {count} pairs are {why}; they are left out", stacklevel=3)
        cut = np.flatnonzero(self._whole > self.max_length)
        if len(cut) and self.split != "train":
            named = ", ".join(str(line + 1) for line in cut[:5])
            warnings.warn(
                f"{self.name}, {self.split}: {len(cut)} sources have more than data.max_length={self.max_length} "
                f"tokens and are truncated (lines {named}{', ...' if len(cut) > 5 else ''})",
                stacklevel=3,
            )
        starts, ends = self._ends[0][:-1], self._ends[0][1:]
        unknown = torch.nonzero(self._tokens[0] == UNKNOWN).flatten().numpy()
        rows = np.unique(np.searchsorted(ends, unknown, side="right"))
        strange = [row for row in rows if not self._subwords.knows(self._tokens[0][starts[row] : ends[row]].tolist())]
        if strange and len(strange) == len(self):
            raise ValueError(
                f"{self.name}, {self.split}: no source holds anything that the tokenizer knows; data.tokenizer is of "
                "other languages"
            )
        if strange:
            warnings.warn(
                f"{self.name}, {self.split}: {len(strange)} sources hold nothing that the tokenizer knows", stacklevel=3
            )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Pair:
        """Token ids of a pair: the decoder reads `BEGIN` and the target without its end."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} pairs of {self.name!r}")
        source, target = (
            tokens[ends[index % len(self)] : ends[index % len(self) + 1]]
            for tokens, ends in zip(self._tokens, self._ends, strict=True)
        )
        return Pair(source, torch.cat([target.new_tensor([BEGIN]), target[:-1]]), target)

    def collate(self, items: Sequence[Pair]) -> PairBatch:
        """Pairs as a padded batch."""
        return pad_pairs(items, PAD, self.multiple)

    @cached_property
    def texts(self) -> Parallel:
        """Sources and references of validation and test, line by line."""
        if self.split == "train":
            raise ValueError("training pairs may be left out, so their lines do not stand beside the items")
        return self.parallel(self.split)

    def samples(self) -> Iterator[np.ndarray]:
        """What tells these pairs from others (`data/samples.py`)."""
        yield self.lengths
        for tokens in self._tokens:
            yield tokens.numpy()

    def describe(self) -> dict[str, object]:
        """Facts for reports and for building a model."""
        tokenizer = self._subwords
        target = {} if tokenizer.joint else {"target_vocabulary": tokenizer.target_vocabulary}
        return {
            "name": self.name,
            "split": self.split,
            "size": len(self),
            "source_tokens": int(self.lengths[:, 0].sum()),
            "target_tokens": int(self.lengths[:, 1].sum()),
            "dropped": self.dropped,
            "vocabulary": tokenizer.vocabulary,
            **target,
            "max_length": self.max_length,
            "pad": PAD,
            "begin": BEGIN,
            "end": END,
        }


@DATASETS.register("multi30k", paper="arXiv:1605.00459")
class Multi30k(Translation):
    """Multi30k: descriptions of images, 29,000 pairs of English with German, French or Czech; options of "translation".

    `path` is the folder `raw` (or `tok`) of the data's repository, or the one above; the hub has it for German as
    `dataset: bentrevett/multi30k`. The test split is that of 2016 unless `test` names another.
    """

    name = "multi30k"

    standard: ClassVar[dict[str, Any]] = {"source": "en", "target": "de", "test": "test_2016_flickr"}

    def _folder(self, path: PairPath | None) -> PairPath | None:
        if isinstance(path, (str, Path)) and (raw := Path(path).expanduser() / "raw").is_dir():
            return raw
        return path


@DATASETS.register("iwslt14")
class IWSLT14(Translation):
    """IWSLT14, talks with German as source and English as target unless told otherwise; options of "translation".

    `path` is the folder or archive that fairseq's preparation makes: train, valid and test, lower-cased Moses tokens.
    """

    name = "iwslt14"

    standard: ClassVar[dict[str, Any]] = {"source": "de", "target": "en", "text_format": "moses"}


def truncated(ids: list[int], length: int) -> list[int]:
    """At most `length` ids, of which the last is the end."""
    return ids if len(ids) <= length else [*ids[: length - 1], END]


def _balanced(source: list[int], target: list[int], ratio: float) -> bool:
    return max(len(source), len(target)) <= ratio * min(len(source), len(target))
