"""Documents with their pieces in another order, which is to be predicted ("reordered_documents").

Paper: ERNIE-Doc, arXiv:2012.15688, section 3.4, a pretraining task without labels. A document is cut into up to m
pieces, the pieces are permuted, and the model predicts the permutation at the end: one class for each permutation of
1, 2, ..., m pieces, 1! + 2! + ... + m! classes.

Legend: B rows, N tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from itertools import permutations
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cached_lab.data.samples import Sample
from cached_lab.data.splits import SPLITS, check_split
from cached_lab.data.text import TextDataset
from cached_lab.registries import DATASETS
from cached_lab.training.loader import mixed_seed

from .dataset import DocumentDataset, check_generated, check_segments

COUNTS = 40
"""Ids of generated documents."""


@DATASETS.register("reordered_documents", paper="arXiv:2012.15688")
@dataclass(eq=False, repr=False)
class ReorderedDocuments(DocumentDataset):
    """Parts of a text, cut into up to `pieces` pieces whose order is to be predicted.

    Training documents are cut and permuted differently in each epoch. Without a text documents are generated, with ids
    that grow from beginning to end, with noise.

    Args:
        split: "train", "validation" or "test".
        path: file, folder or archive of text, or a mapping from split to one of these, as in data set `text`; None
            generates documents.
        pieces: m, the largest number of pieces; there are 1! + ... + m! classes.
        segment_length: tokens in a segment. segments: of a document.
        tokenizer: of a text: "word", "byte" or "bpe". vocabulary_size: largest number of its ids.
        train_size, validation_size, test_size: number of generated documents of each split.
        seed: of the data set.

    Raises:
        FileNotFoundError, ImportError: as `text`.
        ValueError: as `text`; a size below 1, segments of fewer tokens than pieces, or a text shorter than a document.
    """

    split: str
    _: KW_ONLY
    path: str | Path | Mapping[str, str | Path] | None = None
    pieces: int = 3
    segment_length: int = 32
    segments: int = 4
    tokenizer: str = "word"  # type: ignore[assignment]  # the option, later replaced by the tokenizer it names
    vocabulary_size: int | None = None
    train_size: int = 4000
    validation_size: int = 400
    test_size: int = 400
    seed: int = 0

    def __post_init__(self) -> None:
        self._split = SPLITS.index(check_split(self.split))
        check_segments(self.segment_length, self.segments)
        classes = len(orders(self.pieces))
        if self.segment_length < self.pieces:
            raise ValueError(f"data.segment_length={self.segment_length} must be at least data.pieces={self.pieces}")
        sizes = {"train": self.train_size, "validation": self.validation_size, "test": self.test_size}
        check_generated(sizes, self.seed)
        size = sizes[self.split]
        self._text: TextDataset | None = None
        if self.path is not None:
            options = {"path": self.path, "tokenizer": self.tokenizer, "vocabulary_size": self.vocabulary_size}
            text: TextDataset = DATASETS.create("text", split=self.split, **options)
            self._text, size = text, len(text) // (self.segments * self.segment_length)
            if not size:
                raise ValueError(
                    f"the {self.split} split of {self.path} has {len(text)} tokens, less than a document of "
                    f"data.segments={self.segments} x data.segment_length={self.segment_length}; give more text, or "
                    "shorten documents"
                )
        super().__init__(
            "reordered_documents",
            self.split,
            np.array([self._reordered(index, self.segments, 0)[1] for index in range(size)]),
            classes,
            vocabulary=COUNTS if self._text is None else self._text.tokenizer.vocabulary,
            segment_length=self.segment_length,
            segments=self.segments,
            tokenizer=None if self._text is None else self._text.tokenizer,
        )

    def document(self, index: int, segments: int | None = None, epoch: int = 0) -> tuple[Tensor, int]:
        """One document of `segments` segments; a part of a text has at most the segments of the data."""
        count = self.segments if segments is None else segments
        if self._text is not None:
            count = min(count, self.segments)
        return self._reordered(self.position(index), count, epoch)

    def _reordered(self, place: int, segments: int, epoch: int) -> tuple[Tensor, int]:
        seed = mixed_seed(self.seed, self._split, place, epoch, segments)
        length = segments * self.segment_length
        if self._text is None:
            draw = np.random.default_rng(seed)
            tokens_N = (np.arange(length) / length + draw.uniform(-0.05, 0.05, length)) * COUNTS
            tokens_N = tokens_N.clip(0, COUNTS - 1)
        else:
            start = place * self.segments * self.segment_length
            tokens_N = self._text.tokens[start : start + length]
        generator = torch.Generator().manual_seed(seed)
        tokens_1N, class_1 = reorder(torch.from_numpy(tokens_N.astype(np.int64))[None], self.pieces, generator)
        return tokens_1N[0], int(class_1)

    def samples(self) -> Iterator[Sample]:
        yield from super().samples()
        if self._text is not None:
            yield from self._text.samples()


def orders(pieces: int = 4) -> list[tuple[int, ...]]:
    """The permutation of each class: fewer pieces first, in lexicographic order (ValueError: no piece)."""
    if pieces < 1:
        raise ValueError(f"pieces={pieces} must be at least 1")
    return [order for count in range(1, pieces + 1) for order in permutations(range(count))]


def reorder(tokens_BN: Tensor, pieces: int = 4, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Cut each document at random positions, and permute the pieces.

    The number of pieces is sampled first, then the cuts, then the order, all uniformly. Every piece has a token.

    Args:
        tokens_BN: documents without padding. generator: on the CPU.

    Returns:
        The reordered documents, and the class of each (B,): `orders(pieces)[class][i]` is the original index of the
        i-th piece.

    Raises:
        ValueError: documents of fewer tokens than pieces.
    """
    known = {order: index for index, order in enumerate(orders(pieces))}
    length = tokens_BN.shape[1]
    if length < pieces:
        raise ValueError(f"documents of {length} tokens cannot be cut into pieces={pieces}; take fewer pieces")
    documents, classes = [], []
    for row in tokens_BN:
        count = int(torch.randint(1, pieces + 1, (), generator=generator))
        cuts = (torch.randperm(length - 1, generator=generator)[: count - 1] + 1).sort().values.tolist()
        order = tuple(torch.randperm(count, generator=generator).tolist())
        parts = row.tensor_split(cuts)
        documents.append(torch.cat([parts[i] for i in order]))
        classes.append(known[order])
    return torch.stack(documents), torch.tensor(classes, device=tokens_BN.device)
