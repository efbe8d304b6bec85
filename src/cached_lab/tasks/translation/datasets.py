"""Pairs of texts for translation ("translation", "multi30k", "iwslt14"): any two text files, or TSV.

Subwords are trained on the training split only. Multi30k: Elliott et al. (arXiv:1605.00459); IWSLT: Cettolo et al.,
"Report on the 11th IWSLT evaluation campaign" (2014). Training counts and reports the lines that it leaves out;
validation and test keep every line, so scores cover the whole split.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cached_lab.data import subwords
from cached_lab.data.pairs import Pair, PairBatch, pad_pairs
from cached_lab.data.splits import SPLIT_WORDS, check_split
from cached_lab.data.store import Arrays, load_or_build
from cached_lab.data.subwords import BEGIN, END, PAD, PairTokenizer
from cached_lab.data.text import fingerprint
from cached_lab.data.tokenizers import load_tokenizer
from cached_lab.registries import DATASETS
from cached_transformers.registry import unknown_name

from .parallel_files import PairFiles, Parallel, find_pair, read_pair

Names = str | list[str] | None
VERSION = 2  # raise it when the same text gives other ids


@DATASETS.register("translation")
@dataclass(eq=False, repr=False)
class ParallelText:
    """Lines of text with their translations, from files, TSV or archives (`tasks.translation.parallel_files`).

    A split is a name, as in `train.de` and `train.en`, or `train.tsv`, in a folder or archive.

    Args:
        split: "train", "validation" or "test".
        source, target: languages as in the names of files, e.g. "en" and "de".
        path: folder or archive.
        train, validation, test: names of the splits if they are not the usual ones; several are joined.
        vocabulary_size: most ids of the byte pairs, which are trained on both sides of the training split together.
        text_format: "raw", or "moses" for tokens separated by blanks; sacreBLEU scores untokenised text in either case.
        max_length: tokens, the end included, above which training drops a pair and evaluation truncates a source.

    Attributes:
        lengths: tokens of source and target, integers (size, 2).
        tokenizer: a `PairTokenizer`. dropped: number of left out training lines by reason.

    Raises:
        FileNotFoundError: no such path, name or language; the message lists the existing ones.
        ValueError: files of different length, wrong encodings (named by line), options out of range, nothing left.
        ImportError: `tokenizers` is not installed.
    """

    name = "translation"
    task = "translation"
    augment = False

    split: str
    _: KW_ONLY
    path: str | Path
    source: str
    target: str
    train: Names = None
    validation: Names = None
    test: Names = None
    vocabulary_size: int = 8000
    text_format: str = "raw"
    max_length: int = 256

    def __post_init__(self) -> None:
        check_split(self.split)
        self._check()
        self.languages = (self.source, self.target)
        self._read: dict[str, Parallel] = {}
        self.tokenizer = self._trained()
        training = self.split == "train"
        key = {"tokenizer": self._subwords, "text": self._key(self.split), "version": VERSION}
        arrays = load_or_build("translation", {**key, "rules": [training, self.max_length]}, self._encode)
        self._tokens = tuple(torch.from_numpy(arrays[side].astype(np.int64)) for side in ("source", "target"))
        self._ends = tuple(np.cumsum([0, *arrays["lengths"][:, side]]) for side in (0, 1))
        self.lengths: np.ndarray = arrays["lengths"]
        reasons = ("empty", "longer than data.max_length")
        self.dropped = {why: int(n) for why, n in zip(reasons, arrays["dropped"], strict=True) if n}
        for why, count in self.dropped.items():
            warnings.warn(f"{self.name}, {self.split}: {count} pairs are {why}; they are left out", stacklevel=3)
        if len(long := arrays["truncated"]):
            warnings.warn(
                f"{self.name}, {self.split}: {len(long)} sources have more than data.max_length={self.max_length} "
                f"tokens and are truncated (lines {', '.join(map(str, long[:5]))}{', ...' * (len(long) > 5)})",
                stacklevel=3,
            )

    def _check(self) -> None:
        if not (self.source and self.target) or self.source == self.target:
            raise ValueError(f"data.source={self.source!r} and data.target={self.target!r} must be two languages")
        if self.text_format not in subwords.FORMATS:
            raise ValueError(unknown_name("data.text_format", self.text_format, list(subwords.FORMATS)))
        # The smallest vocabulary holds the special ids and the 256 bytes.
        for name, smallest in {"vocabulary_size": subwords.SMALLEST, "max_length": 2}.items():
            if (value := getattr(self, name)) < smallest:
                raise ValueError(f"data.{name}={value} must be at least {smallest}")

    def _files(self, split: str) -> list[PairFiles]:
        given: Names = getattr(self, split)
        names = [given] if isinstance(given, str) else given
        choices = [SPLIT_WORDS[split]] if names is None else [(name,) for name in names]
        return [find_pair(self.path, split, choice, self.languages) for choice in choices]

    def _key(self, split: str) -> Any:
        """Everything that determines the lines of a split, as JSON."""
        return [*(fingerprint(list(pair)) for pair in self._files(split)), *self.languages]

    def parallel(self, split: str) -> Parallel:
        """Return the lines of a split, empty ones too."""
        if split not in self._read:
            parts = [read_pair(files, self.languages) for files in self._files(split)]
            source, target = ([line for part in parts for line in part[side]] for side in (0, 1))
            self._read[split] = Parallel(source, target, "; ".join(part.name for part in parts))
        return self._read[split]

    def _trained(self) -> PairTokenizer:
        self._subwords = {"size": self.vocabulary_size, "format": self.text_format, "train": self._key("train")}

        def train() -> Arrays:
            lines = self.parallel("train")
            texts = [line for side in lines[:2] for line in side if line.strip()]
            if not texts:
                raise ValueError(f"{lines.name}: no training line holds text")
            dumped = PairTokenizer.train(texts, self.vocabulary_size, self.text_format).dump()
            return {"tokenizer": np.frombuffer(dumped, dtype=np.uint8)}

        stored = load_or_build("subwords", {**self._subwords, "version": VERSION}, train)
        loaded = load_tokenizer(stored["tokenizer"].tobytes())
        assert isinstance(loaded, PairTokenizer)
        return loaded

    def _encode(self) -> Arrays:
        lines, training, most = self.parallel(self.split), self.split == "train", self.max_length
        pairs = list(zip(lines.source, lines.target, strict=True))
        kept = [pair for pair in pairs if pair[0].strip() and pair[1].strip()] if training else pairs
        sides = [self.tokenizer.encode_batch([pair[side] for pair in kept]) for side in (0, 1)]
        both = list(zip(*sides, strict=True))
        long: list[int] = []
        if training:
            both = [(s, t) for s, t in both if max(len(s), len(t)) <= most]
        else:
            long = [number for number, (s, _) in enumerate(both, 1) if len(s) > most]
            both = [(truncated(s, most), truncated(t, most)) for s, t in both]
        dropped = [len(pairs) - len(kept), len(kept) - len(both)]
        if not both:
            raise ValueError(
                f"{lines.name}: none of {len(pairs)} pairs is left ({dropped[0]} empty, {dropped[1]} longer than "
                f"data.max_length={most}); raise it, or check the data"
            )
        kind = np.uint16 if self.tokenizer.vocabulary <= 1 << 16 else np.int32
        source, target = (np.array([i for pair in both for i in pair[side]], dtype=kind) for side in (0, 1))
        counts = {"lengths": [[len(s), len(t)] for s, t in both], "dropped": dropped, "truncated": long}
        arrays = {name: np.array(values, dtype=np.int64) for name, values in counts.items()}
        return {"source": source, "target": target, **arrays}

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Pair:
        """Return token ids of a pair: the decoder reads `BEGIN` and the target without its end."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} pairs of {self.name!r}")
        source, target = (
            tokens[ends[index % len(self)] : ends[index % len(self) + 1]]
            for tokens, ends in zip(self._tokens, self._ends, strict=True)
        )
        return Pair(source, torch.cat([target.new_tensor([BEGIN]), target[:-1]]), target)

    def collate(self, items: Sequence[Pair]) -> PairBatch:
        """Return pairs as a padded batch."""
        return pad_pairs(items, PAD)

    @cached_property
    def texts(self) -> Parallel:
        """Lines of sources and references of validation and test."""
        if self.split == "train":
            raise ValueError("split='train' leaves out pairs, so lines and items differ; take parallel('train')")
        return self.parallel(self.split)

    def samples(self) -> Iterator[np.ndarray]:
        """Yield samples for the fingerprint of the data (`data/samples.py`)."""
        yield self.lengths
        for tokens in self._tokens:
            yield tokens.numpy()

    def describe(self) -> dict[str, object]:
        """Return facts for reports and for building a model."""
        return {
            "name": self.name,
            "split": self.split,
            "size": len(self),
            "source_tokens": int(self.lengths[:, 0].sum()),
            "target_tokens": int(self.lengths[:, 1].sum()),
            "dropped": self.dropped,
            "vocabulary": self.tokenizer.vocabulary,
            "max_length": self.max_length,
            "pad": PAD,
            "begin": BEGIN,
            "end": END,
        }


@DATASETS.register("multi30k", paper="arXiv:1605.00459")
@dataclass(kw_only=True, eq=False, repr=False)
class Multi30k(ParallelText):
    """Multi30k: descriptions of images, 29,000 pairs of English with German, French or Czech; options of "translation".

    `path` is the folder `raw` (or `tok`) of the data's repository, or the one above.
    """

    name = "multi30k"
    source: str = "en"
    target: str = "de"
    test: Names = "test_2016_flickr"

    def __post_init__(self) -> None:
        if (raw := Path(self.path).expanduser() / "raw").is_dir():
            self.path = raw
        super().__post_init__()


@DATASETS.register("iwslt14")
@dataclass(kw_only=True, eq=False, repr=False)
class IWSLT14(ParallelText):
    """IWSLT14: talks, by default from German to English; options of "translation".

    `path` is the folder or archive of fairseq's preparation: train, valid and test, lower-cased Moses tokens.
    """

    name = "iwslt14"
    source: str = "de"
    target: str = "en"
    text_format: str = "moses"


def truncated(ids: list[int], length: int) -> list[int]:
    """Return at most `length` ids; the last is the end."""
    return ids if len(ids) <= length else [*ids[: length - 1], END]
