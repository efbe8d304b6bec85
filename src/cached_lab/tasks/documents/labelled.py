"""Texts with a label each, from files, as token ids ("labelled_documents").

Legend: N tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cached_lab.data.samples import Sample
from cached_lab.data.splits import check_fraction, check_split, items_of_split
from cached_lab.data.store import load_or_build
from cached_lab.data.tokenizers import Tokenizer, check_kind, load_tokenizer, train_tokenizer
from cached_lab.registries import DATASETS

from .dataset import Documents, check_segments
from .files import Labelled, read_labelled


@DATASETS.register("labelled_documents")
@dataclass(eq=False, repr=False)
class LabelledDocuments(Documents):
    """Texts of any length with a label each, from a JSON-lines, CSV or TSV file or folder, or a folder for each class.

    Files or folders named after splits (`train.jsonl`, `test/<class>/*.txt`) are used as such. A split without one is
    dealt from the rest by the fractions below, a share of every class. Classes are the labels in alphabetical order.

    Args:
        split: "train", "validation" or "test".
        path: the file or folder.
        text, label: names of the fields of a table.
        tokenizer: "word", "byte" or "bpe"; its vocabulary is built on the training split.
        vocabulary_size: largest number of token ids; None for all words, or 16,000 byte pairs.
        segment_length: tokens in a segment.
        segments: of each document the first ones that are read; None reads all.
        validation_fraction, test_fraction: shares held out where no file or folder is named after the split.
        seed: which texts are.

    Raises:
        FileNotFoundError: no such path, or nothing in it.
        ValueError: see `read_labelled`; also fewer than two labels, a label that training does not have, an empty
            split, or a wrong option.
        ImportError: tokenizer="bpe" needs the `tokenizers` library.
    """

    split: str
    _: KW_ONLY
    path: str | Path
    text: str = "text"
    label: str = "label"
    tokenizer: str = "word"  # type: ignore[assignment]  # an option first, and then what it names
    vocabulary_size: int | None = None
    segment_length: int = 128
    segments: int | None = None  # type: ignore[assignment]  # and then that of the longest document
    validation_fraction: float = 0.1
    test_fraction: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        check_split(self.split)
        kind: str = self.tokenizer  # type: ignore[assignment]
        check_kind(kind, self.vocabulary_size)
        check_segments(self.segment_length, self.segments)
        records = read_labelled(self.path, self.text, self.label)
        train, mine = self._part(records, "train"), self._part(records, self.split)
        names = sorted({record.label for record in train})
        if len(names) < 2:
            raise ValueError(
                f"{self.path}: the training texts have the label {names[0]!r} alone; two or more are needed"
            )
        if foreign := sorted({record.label for record in mine} - {*names}):
            raise ValueError(f"{self.path}: split {self.split!r} has labels that training has not: {foreign[:5]}")
        found = _trained([record.text for record in train], kind, self.vocabulary_size)
        self._tokens = [found.encode(record.text) for record in mine]
        longest = max(-(-len(tokens_N) // self.segment_length) for tokens_N in self._tokens)
        self._longest = longest if self.segments is None else min(longest, self.segments)
        super().__init__(
            "labelled_documents",
            self.split,
            np.array([names.index(record.label) for record in mine]),
            len(names),
            vocabulary=found.vocabulary,
            segment_length=self.segment_length,
            segments=self._longest,
            tokenizer=found,
        )
        self.names = names

    def _part(self, records: list[Labelled], split: str) -> list[Labelled]:
        """The texts of a split: those that are named after it, or a share of those for which no split is left."""
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
        """One document, of which no more than so many segments are read."""
        place, most = self.position(index), self._longest if segments is None else min(segments, self._longest)
        tokens_N = self._tokens[place][: most * self.segment_length].astype(np.int64)
        return torch.from_numpy(tokens_N), int(self.labels[place])

    def samples(self) -> Iterator[Sample]:
        yield from super().samples()
        yield np.concatenate(self._tokens)

    def describe(self) -> dict[str, object]:
        ends = {"sentence_ends": self.tokenizer.sentence_ends, "paragraph_ends": self.tokenizer.line_ends}  # type: ignore[attr-defined]
        return {**super().describe(), "labels": self.names, **ends}


def _trained(texts: list[str], kind: str, size: int | None) -> Tokenizer:
    """The tokenizer of these texts, kept on disk."""
    digest = hashlib.sha256("\0".join(texts).encode("utf-8", "surrogateescape")).hexdigest()

    def build() -> dict[str, np.ndarray]:
        return {"tokenizer": np.frombuffer(train_tokenizer(kind, texts, size, True).dump(), dtype=np.uint8)}

    stored = load_or_build("vocabulary", {"kind": kind, "size": size, "documents": digest}, build)
    return load_tokenizer(stored["tokenizer"].tobytes())
