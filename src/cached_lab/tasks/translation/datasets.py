"""Pairs of texts for translation ("translation", "multi30k", "iwslt14"): any two text files, TSV, or data of the hub.

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

VERSION = 1  # raise it when the same text gives other ids
Names = str | list[str] | None


@DATASETS.register("translation")
@dataclass(eq=False, repr=False)
class ParallelText:
    """Lines of text with their translations: files, TSV, archives, or a data set of the Hugging Face hub.

    A split is a name, as in `train.de` and `train.en`, or `train.tsv`, in a folder or archive; any text may separate it
    from the language, and a suffix of compression may follow (see `tasks.translation.parallel_files`).

    Args:
        split: "train", "validation" or "test".
        source, target: languages as in the names of files or columns, e.g. "en" and "de"; null: those of the data set.
        path: folder or archive; or a mapping from split to a TSV file or to [source file, target file].
        dataset: name of a data set of the hub, or of a folder written by `save_to_disk`, instead of `path`.
        config: its configuration.
        train, validation, test: names of the splits if they are not the usual ones; several are joined.
        tokenizer: "bpe" or "unigram", trained on the training side; or a file: a sentencepiece .model, the
            tokenizer.json of another run, or its folder.
        vocabulary_size: most ids, of both sides together or of each.
        joint: one vocabulary for both sides.
        text_format: "raw", or "moses" for tokens separated by blanks; sacreBLEU scores untokenised text in either case.
            null: "raw", or the format of the data set.
        lowercase: put everything into lower case, references too.
        max_length: tokens, the end included, above which training drops a pair and evaluation truncates a source.
        max_ratio: greatest ratio of the tokens of both sides in training; null for no limit. fairseq's preparation of
            IWSLT takes 1.5.
        limit: number of training pairs, from the first on.
        multiple: lengths of a batch are rounded up to a multiple of this, so that few shapes occur.

    Attributes:
        lengths: tokens of source and target, integers (size, 2).
        tokenizer: a `PairTokenizer`. dropped: number of left out training lines by reason.

    Raises:
        FileNotFoundError: no such path, name or language; the message lists the existing ones.
        ValueError: files of different length, wrong encodings (named by line), options out of range, nothing left.
        ImportError: `tokenizers`, `sentencepiece` or `datasets` is wanted and not installed.
    """

    name = "translation"
    task = "translation"
    augment = False
    standard: ClassVar[dict[str, Any]] = {}
    """Values for `source`, `target`, `test` or `text_format` that are null."""

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
        self.tokenizer = self._subwords  # type: ignore[assignment]  # the option is a name
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
        if not (self.source and self.target) or self.source == self.target:
            raise ValueError(f"data.source={self.source!r} and data.target={self.target!r} must be two languages")
        if self.text_format not in subwords.FORMATS:
            raise ValueError(unknown_name("data.text_format", self.text_format, list(subwords.FORMATS)))
        # The smallest vocabulary holds the special ids and the 256 bytes.
        least = {"vocabulary_size": subwords.SMALLEST, "max_length": 2, "limit": 1, "multiple": 1, "max_ratio": 1}
        for name, smallest in least.items():
            if (value := getattr(self, name)) is not None and value < smallest:
                raise ValueError(f"data.{name}={value} must be at least {smallest}")
        if self.max_length % self.multiple:
            raise ValueError(f"data.max_length={self.max_length} must be a multiple of data.multiple={self.multiple}")

    def _folder(self, path: PairPath | None) -> PairPath | None:
        """Return the folder of the files under a given path."""
        return path

    def _key(self, split: str) -> Any:
        """Return everything that determines the lines of a split, as JSON."""
        sides = [*self.languages, self.lowercase]
        if self.dataset is not None:
            rows, columns = load_hub(self.dataset, self.config, split, self.languages)
            return [self.dataset, self.config, columns, len(rows), rows._fingerprint, *sides]
        return [pair_key(self._files(split)), *sides]

    def _files(self, split: str) -> list[PairFiles]:
        assert self.path is not None
        given: Names = getattr(self, split)
        names = SPLIT_WORDS[split] if given is None else [given] if isinstance(given, str) else given
        return find_pair(self.path, split, names, self.languages)

    def parallel(self, split: str) -> Parallel:
        """Return the lines of a split (in lower case, with `lowercase`), empty ones too."""
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
        balanced = fitting
        if training and ratio is not None:
            balanced = [(s, t) for s, t in fitting if max(len(s), len(t)) <= ratio * min(len(s), len(t))]
        if not balanced:
            raise ValueError(
                f"{lines.name}: none of {len(pairs)} pairs is left ({empty} empty, {long} longer than data.max_length="
                f"{self.max_length}, {len(fitting)} beyond data.max_ratio={ratio}); raise these, or check the data"
            )
        kind = np.uint16 if max(self._subwords.vocabulary, self._subwords.target_vocabulary) <= 1 << 16 else np.int32
        flat = [np.array([i for pair in balanced for i in pair[side]], dtype=kind) for side in (0, 1)]
        lengths = np.array([[len(s), len(t)] for s, t in balanced], dtype=np.int64)
        dropped = np.array([empty, long, len(fitting) - len(balanced)], dtype=np.int64)
        return {"source": flat[0], "target": flat[1], "lengths": lengths, "dropped": dropped, "whole": whole}

    def _report(self) -> None:
        """Warn of left out, truncated and unknown lines."""
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
                f"{self.name}, {self.split}: no source holds anything that the tokenizer knows; give a data.tokenizer "
                "of these languages"
            )
        if strange:
            warnings.warn(
                f"{self.name}, {self.split}: {len(strange)} sources hold nothing that the tokenizer knows", stacklevel=3
            )

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
        return pad_pairs(items, PAD, self.multiple)

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
class Multi30k(ParallelText):
    """Multi30k: descriptions of images, 29,000 pairs of English with German, French or Czech; options of "translation".

    `path` is the folder `raw` (or `tok`) of the data's repository, or the one above; for German the hub has
    `dataset: bentrevett/multi30k`. The default of `test` is the split of 2016.
    """

    name = "multi30k"

    standard: ClassVar[dict[str, Any]] = {"source": "en", "target": "de", "test": "test_2016_flickr"}

    def _folder(self, path: PairPath | None) -> PairPath | None:
        if isinstance(path, (str, Path)) and (raw := Path(path).expanduser() / "raw").is_dir():
            return raw
        return path


@DATASETS.register("iwslt14")
class IWSLT14(ParallelText):
    """IWSLT14: talks, by default from German to English; options of "translation".

    `path` is the folder or archive of fairseq's preparation: train, valid and test, lower-cased Moses tokens.
    """

    name = "iwslt14"

    standard: ClassVar[dict[str, Any]] = {"source": "de", "target": "en", "text_format": "moses"}


def truncated(ids: list[int], length: int) -> list[int]:
    """Return at most `length` ids; the last is the end."""
    return ids if len(ids) <= length else [*ids[: length - 1], END]
