"""Pairs of texts for translation ("translation", "multi30k", "iwslt14"): any two text files, TSV, or data of the hub.

The subwords are those of the training side alone. Multi30k: Elliott et al. (arXiv:1605.00459); IWSLT: Cettolo et al.,
"Report on the 11th IWSLT evaluation campaign" (2014). Lines that training leaves out are counted and reported;
validation and test keep every line, so that scores are of the whole split.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from cached_transformers.data.pairs import Pair, PairBatch, pad_pairs
from cached_transformers.data.splits import SPLIT_WORDS, check_split
from cached_transformers.data.store import Arrays, load_or_build
from cached_transformers.data.subwords import (
    BEGIN,
    END,
    FORMATS,
    PAD,
    SMALLEST,
    SUBWORDS,
    UNKNOWN,
    PairTokenizer,
    read_pair_tokenizer,
    train_subwords,
)
from cached_transformers.data.tokenizers import load_tokenizer
from cached_transformers.registry import DATASETS, unknown_name

from .parallel_files import PairPath, Parallel, find_pair, load_hub, pair_key, read_hub, read_pair

VERSION = 1  # to be raised when the same text gives other ids
Names = str | list[str] | None


@DATASETS.register("translation")
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

    task = "translation"
    registered = "translation"
    augment = False
    standard: ClassVar[dict[str, Any]] = {}
    """What a data set of its own name has where `source`, `target`, `test` or `text_format` is null."""

    def __init__(
        self,
        split: str,
        *,
        source: str | None = None,
        target: str | None = None,
        path: PairPath | None = None,
        dataset: str | None = None,
        config: str | None = None,
        train: Names = None,
        validation: Names = None,
        test: Names = None,
        tokenizer: str = "bpe",
        vocabulary_size: int = 8000,
        joint: bool = True,
        text_format: str | None = None,
        lowercase: bool = False,
        max_length: int = 256,
        max_ratio: float | None = None,
        limit: int | None = None,
        multiple: int = 1,
    ) -> None:
        self.name, self.split = self.registered, check_split(split)
        usual = self.standard
        source, target = source or usual.get("source", ""), target or usual.get("target", "")
        test, text_format = test or usual.get("test"), text_format or usual.get("text_format", "raw")
        path = self._folder(path)
        _check(path, dataset, source, target, vocabulary_size, text_format, max_length, max_ratio, limit, multiple)
        self.languages, self.text_format, self.lowercase = (source, target), text_format, lowercase
        self.max_length, self.max_ratio, self.multiple = max_length, max_ratio, multiple
        self._path, self._hub, self._limit, self._joint = path, (dataset, config), limit, joint
        chosen = {"train": train, "validation": validation, "test": test}
        self._names = {
            name: SPLIT_WORDS[name] if given is None else [given] if isinstance(given, str) else list(given)
            for name, given in chosen.items()
        }
        self._read: dict[str, Parallel] = {}
        self.tokenizer = self._tokenizer(tokenizer, vocabulary_size)
        key = {"tokenizer": self._tokenizer_key, "text": self._key(split), "version": VERSION}
        rules = [split == "train", max_length, max_ratio, limit if split == "train" else None]
        arrays = load_or_build("translation", {**key, "rules": rules}, self._encode)
        self._tokens = tuple(torch.from_numpy(arrays[side].astype(np.int64)) for side in ("source", "target"))
        self._ends = tuple(np.cumsum([0, *arrays["lengths"][:, side]]) for side in (0, 1))
        self.lengths: np.ndarray = arrays["lengths"]
        self._whole = arrays["whole"]
        reasons = ("empty", "longer than data.max_length", "beyond data.max_ratio")
        self.dropped = {why: int(n) for why, n in zip(reasons, arrays["dropped"], strict=True) if n}
        self._report()

    # --------------------------------------------------------------------------------------------------- reading

    def _folder(self, path: PairPath | None) -> PairPath | None:
        """Where the files lie under what the user gave."""
        return path

    def _key(self, split: str) -> Any:
        """What decides the lines of a split, as JSON."""
        sides = [*self.languages, self.lowercase]
        if self._hub[0] is not None:
            rows, columns = load_hub(self._hub[0], self._hub[1], split, self.languages)
            return [*self._hub, columns, len(rows), rows._fingerprint, *sides]
        assert self._path is not None
        return [pair_key(find_pair(self._path, split, self._names[split], self.languages)), *sides]

    def parallel(self, split: str) -> Parallel:
        """The lines of a split as they stand in the files (in lower case, if so), empty ones too."""
        if split not in self._read:
            if self._hub[0] is not None:
                parts = [read_hub(*load_hub(self._hub[0], self._hub[1], split, self.languages), str(self._hub[0]))]
            else:
                assert self._path is not None
                found = find_pair(self._path, split, self._names[split], self.languages)
                parts = [read_pair(files, self.languages) for files in found]
            lower = str.lower if self.lowercase else str
            sides = [[lower(line) for part in parts for line in part[side]] for side in (0, 1)]
            self._read[split] = Parallel(sides[0], sides[1], "; ".join(part.name for part in parts))
        return self._read[split]

    def _tokenizer(self, kind: str, size: int) -> PairTokenizer:
        if kind not in SUBWORDS:
            if not Path(kind).expanduser().exists():
                raise ValueError(f"{unknown_name('tokenizer', kind, list(SUBWORDS))}, nor is it a file")
            found = read_pair_tokenizer(kind, self.text_format, self.lowercase)
            self._tokenizer_key: Any = found.dump().decode()
            return found
        options = {"kind": kind, "size": size, "joint": self._joint, "format": self.text_format}
        self._tokenizer_key = {**options, "train": self._key("train"), "limit": self._limit, "version": VERSION}

        def train() -> Arrays:
            lines = self.parallel("train")
            sides = [[line for line in side[: self._limit] if line.strip()] for side in lines[:2]]
            if not all(sides):
                raise ValueError(f"{lines.name}: no training line holds text")
            texts = [[*sides[0], *sides[1]]] if self._joint else sides
            trained = [train_subwords(kind, part, size, self.text_format) for part in texts]
            target = None if self._joint else trained[1]
            dumped = PairTokenizer(trained[0], target, self.text_format, self.lowercase).dump()
            return {"tokenizer": np.frombuffer(dumped, dtype=np.uint8)}

        stored = load_or_build("subwords", self._tokenizer_key, train)
        loaded = load_tokenizer(stored["tokenizer"].tobytes())
        assert isinstance(loaded, PairTokenizer)
        return loaded

    def _encode(self) -> Arrays:
        lines, training = self.parallel(self.split), self.split == "train"
        pairs = list(zip(lines.source, lines.target, strict=True))[: self._limit if training else None]
        kept = [pair for pair in pairs if pair[0].strip() and pair[1].strip()] if training else pairs
        empty = len(pairs) - len(kept)
        sources, targets = (
            self.tokenizer.encode_batch([pair[side] for pair in kept], target=side == 1) for side in (0, 1)
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
        kind = np.uint16 if max(self.tokenizer.vocabulary, self.tokenizer.target_vocabulary) <= 1 << 16 else np.int32
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
        strange = [row for row in rows if not self.tokenizer.knows(self._tokens[0][starts[row] : ends[row]].tolist())]
        if strange and len(strange) == len(self):
            raise ValueError(
                f"{self.name}, {self.split}: no source holds anything that the tokenizer knows; data.tokenizer is of "
                "other languages"
            )
        if strange:
            warnings.warn(
                f"{self.name}, {self.split}: {len(strange)} sources hold nothing that the tokenizer knows", stacklevel=3
            )

    # ---------------------------------------------------------------------------------------------------- items

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

    def describe(self) -> dict[str, object]:
        """Facts for reports and for building a model."""
        tokenizer = self.tokenizer
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

    registered = "multi30k"

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

    registered = "iwslt14"

    standard: ClassVar[dict[str, Any]] = {"source": "de", "target": "en", "text_format": "moses"}


def truncated(ids: list[int], length: int) -> list[int]:
    """At most `length` ids, of which the last is the end."""
    return ids if len(ids) <= length else [*ids[: length - 1], END]


def _balanced(source: list[int], target: list[int], ratio: float) -> bool:
    return max(len(source), len(target)) <= ratio * min(len(source), len(target))


def _check(
    path: object,
    dataset: str | None,
    source: str,
    target: str,
    size: int,
    text_format: str,
    max_length: int,
    max_ratio: float | None,
    limit: int | None,
    multiple: int,
) -> None:
    if (path is None) == (dataset is None):
        raise ValueError(f"data.path={path!r} and data.dataset={dataset!r}: give one of them")
    if not (source and target):
        raise ValueError(f"data.source={source or None!r} and data.target={target or None!r}: name both languages")
    if source == target:
        raise ValueError(f"data.source={source!r} and data.target={target!r} must be two languages")
    if text_format not in FORMATS:
        raise ValueError(unknown_name("data.text_format", text_format, list(FORMATS)))
    if size < SMALLEST:
        raise ValueError(f"data.vocabulary_size={size} must be at least {SMALLEST}: special ids and the 256 bytes")
    for name, value, least in (("max_length", max_length, 2), ("limit", limit, 1), ("multiple", multiple, 1)):
        if value is not None and value < least:
            raise ValueError(f"data.{name}={value} must be at least {least}")
    if max_length % multiple:
        raise ValueError(f"data.max_length={max_length} must be a multiple of data.multiple={multiple}")
    if max_ratio is not None and max_ratio < 1:
        raise ValueError(f"data.max_ratio={max_ratio} must be at least 1, or null")
