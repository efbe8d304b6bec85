"""Texts with a label each, from JSON lines, as token ids ("labelled_documents").

Legend: N tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cached_lab.data.archives import OPENERS
from cached_lab.data.samples import Sample
from cached_lab.data.splits import check_fraction, check_split, items_of_split, named_split
from cached_lab.data.text import trained_tokenizer
from cached_lab.data.text_files import TextFile, decoded
from cached_lab.data.tokenizers import check_kind
from cached_lab.registries import DATASETS
from cached_transformers.annotations import shown

from .dataset import DocumentDataset

TABLE = ".jsonl"


@DATASETS.register("labelled_documents")
@dataclass(eq=False, repr=False)
class LabelledDocuments(DocumentDataset):
    """Texts of any length with a label each, from a JSON-lines file or a folder of them.

    Files or folders named after splits (`train.jsonl`, `test/*.jsonl`) are used as such. A split without one is dealt
    from the rest by the fractions below, with equal shares of every class. Classes are the labels in alphabetical
    order.

    Args:
        split: "train", "validation" or "test".
        path: the file or folder.
        text, label: names of the fields of a table.
        tokenizer: "word", "byte" or "bpe"; its vocabulary is built on the training split.
        vocabulary_size: largest number of token ids; None for all words, or 16,000 byte pairs.
        segment_length: tokens in a segment.
        segments: most segments read of each document, from its beginning; None reads all.
        validation_fraction, test_fraction: shares held out if no file or folder is named after the split.
        seed: of the deal.

    Raises:
        FileNotFoundError: no such path, or nothing in it.
        ValueError: see `read_labelled`; also fewer than two labels, a label that training lacks, an empty split, or a
            wrong option.
        ImportError: tokenizer="bpe" needs the `tokenizers` library.
    """

    split: str
    _: KW_ONLY
    path: str | Path
    text: str = "text"
    label: str = "label"
    tokenizer: str = "word"  # type: ignore[assignment]  # the option, later replaced by the tokenizer it names
    vocabulary_size: int | None = None
    segment_length: int = 128
    segments: int | None = None  # type: ignore[assignment]  # later the segments of the longest document
    validation_fraction: float = 0.1
    test_fraction: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        check_split(self.split)
        kind: str = self.tokenizer  # type: ignore[assignment]
        check_kind(kind, self.vocabulary_size)
        self.check_segments()
        records = read_labelled(self.path, self.text, self.label)
        train, mine = self._part(records, "train"), self._part(records, self.split)
        names = sorted({record.label for record in train})
        if len(names) < 2:
            raise ValueError(f"{self.path}: the training texts have only the label {names[0]!r}; two are needed")
        if foreign := sorted({record.label for record in mine} - {*names}):
            raise ValueError(f"{self.path}: split {self.split!r} has labels that training has not: {foreign[:5]}")
        texts = [record.text for record in train]
        digest = hashlib.sha256("\0".join(texts).encode("utf-8", "surrogateescape")).hexdigest()
        key = {"kind": kind, "size": self.vocabulary_size, "documents": digest}
        found = trained_tokenizer(kind, key, lambda: texts, self.vocabulary_size, True)
        self._tokens = [found.encode(record.text) for record in mine]
        longest = max(-(-len(tokens_N) // self.segment_length) for tokens_N in self._tokens)
        self.segments = longest if self.segments is None else min(longest, self.segments)
        self.names, labels = names, np.array([names.index(record.label) for record in mine])
        sizes = {"vocabulary": found.vocabulary, "tokenizer": found}
        super().__init__("labelled_documents", self.split, labels, len(names), **sizes)  # type: ignore[arg-type]

    def _part(self, records: list[LabelledText], split: str) -> list[LabelledText]:
        """The texts named after a split, or its share of those named after "train" or none."""
        own = {record.split for record in records}
        if split != "train" and split in own:
            return [record for record in records if record.split == split]
        rest = [record for record in records if record.split in ("train", None)]
        shares = {"validation": self.validation_fraction, "test": self.test_fraction}
        dealt = {name: check_fraction(f"data.{name}_fraction", s) for name, s in shares.items() if name not in own}
        if not dealt:
            return rest
        labels = np.unique([record.label for record in rest], return_inverse=True)[1]
        return [rest[index] for index in items_of_split(self.path, labels, dealt, self.seed, split)]

    def document(self, index: int, segments: int | None = None, epoch: int = 0) -> tuple[Tensor, int]:
        """One document, truncated to `segments` segments."""
        place, longest = self.position(index), int(self.segments or 0)
        most = longest if segments is None else min(segments, longest)
        tokens_N = self._tokens[place][: most * self.segment_length].astype(np.int64)
        return torch.from_numpy(tokens_N), int(self.labels[place])

    def samples(self) -> Iterator[Sample]:
        yield from super().samples()
        yield np.concatenate(self._tokens)

    def describe(self) -> dict[str, object]:
        ends = {"sentence_ends": self.tokenizer.sentence_ends, "paragraph_ends": self.tokenizer.line_ends}  # type: ignore[attr-defined]
        return {**super().describe(), "labels": self.names, **ends}


class LabelledText(NamedTuple):
    """A text, its label as written, and the split that its file or folder is named after, if any."""

    text: str
    label: str
    split: str | None


def read_labelled(path: str | Path, text: str, label: str) -> list[LabelledText]:
    """All texts with labels in a file or folder of JSON lines, in order of the names.

    A line has a text and a label in the fields of these names; files or folders may be named after splits, and may be
    compressed (.xz, .gz, .bz2).

    Raises:
        FileNotFoundError: no such path, or no JSON lines in it.
        ValueError: a line (named) without text or label, or invalid JSON or UTF-8.
    """
    path = Path(path).expanduser()
    if path.is_file():
        return list(_rows(TextFile(path, path.name), text, label))
    names = [f"*{TABLE}{packed}" for packed in ("", *OPENERS)]
    files = sorted(file for name in names for file in path.rglob(name) if not file.name.startswith("."))
    if not files:
        raise FileNotFoundError(f"{path} holds no {TABLE}; give a file or folder of JSON lines with a text and a label")
    tables = [TextFile(file, file.relative_to(path).as_posix()) for file in files]
    return [record for table in tables for record in _rows(table, text, label)]


def _rows(table: TextFile, text: str, label: str) -> Iterator[LabelledText]:
    parts = PurePosixPath(table.name).parts
    split = named_split(parts[-1].partition(".")[0], parts[:-1])
    for number, line in enumerate(decoded(table.content(), table).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{table}, line {number} is not JSON ({error}); correct the line, or remove it") from None
        fields = list(row) if isinstance(row, dict) else []
        if missing := [name for name in (text, label) if name not in fields or row[name] in (None, "")]:
            raise ValueError(
                f"{table}, line {number} has no {missing[0]!r}, only {', '.join(map(str, fields)) or 'nothing'}; set "
                "data.text and data.label to the names of the fields"
            )
        if not isinstance(row[text], str) or isinstance(row[label], list | dict):
            raise ValueError(f"{table}, line {number}: {shown(row)} must have a text, and a word or number for a label")
        yield LabelledText(row[text], str(row[label]), split)
