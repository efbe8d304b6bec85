"""Documents with their pieces in another order, which is to be predicted ("reordered_documents").

Paper: ERNIE-Doc, arXiv:2012.15688, section 3.4, a pretraining task without labels. A document is cut into up to m
pieces, the pieces are permuted, and the model predicts the permutation at the end: one class for each permutation of
1, 2, ..., m pieces, 1! + 2! + ... + m! classes.

Legend: N tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from itertools import permutations
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cached_lab.data.samples import Sample
from cached_lab.data.splits import SPLITS
from cached_lab.data.text import TextDataset
from cached_lab.registries import DATASETS
from cached_lab.training.loader import mixed_seed

from .dataset import DocumentDataset

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
        path: file, folder or archive of text, as in data set `text`; None generates documents.
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
    path: str | Path | None = None
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
        size = self.generated_size((self.train_size, self.validation_size, self.test_size), self.seed)
        classes = len(orders(self.pieces))
        if self.segment_length < self.pieces:
            raise ValueError(f"data.segment_length={self.segment_length} must be at least data.pieces={self.pieces}")
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
        tokenizer = None if self._text is None else self._text.tokenizer
        super().__init__(
            "reordered_documents",
            self.split,
            np.array([self._reordered(index, self.segments, 0)[1] for index in range(size)]),
            classes,
            vocabulary=COUNTS if tokenizer is None else tokenizer.vocabulary,
            tokenizer=tokenizer,
        )

    def document(self, index: int, segments: int | None = None, epoch: int = 0) -> tuple[Tensor, int]:
        """One document of `segments` segments; a part of a text has at most the segments of the data."""
        count = self.segments if segments is None else segments
        if self._text is not None:
            count = min(count, self.segments)
        return self._reordered(self.position(index), count, epoch)

    def _reordered(self, place: int, segments: int, epoch: int) -> tuple[Tensor, int]:
        seed = mixed_seed(self.seed, SPLITS.index(self.split), place, epoch, segments)
        length = segments * self.segment_length
        if self._text is None:
            draw = np.random.default_rng(seed)
            tokens_N = (np.arange(length) / length + draw.uniform(-0.05, 0.05, length)) * COUNTS
            tokens_N = tokens_N.clip(0, COUNTS - 1)
        else:
            start = place * self.segments * self.segment_length
            tokens_N = self._text.tokens[start : start + length]
        generator = torch.Generator().manual_seed(seed)
        return reorder(torch.from_numpy(tokens_N.astype(np.int64)), self.pieces, generator)

    def samples(self) -> Iterator[Sample]:
        yield from super().samples()
        if self._text is not None:
            yield from self._text.samples()


def orders(pieces: int = 4) -> list[tuple[int, ...]]:
    """The permutation of each class: fewer pieces first, in lexicographic order (ValueError: no piece)."""
    if pieces < 1:
        raise ValueError(f"pieces={pieces} must be at least 1")
    return [order for count in range(1, pieces + 1) for order in permutations(range(count))]


def reorder(tokens_N: Tensor, pieces: int = 4, generator: torch.Generator | None = None) -> tuple[Tensor, int]:
    """Cut a document at random positions, and permute the pieces.

    The number of pieces is sampled first, then the cuts, then the order, all uniformly. Every piece has a token.

    Args:
        generator: on the CPU.

    Returns:
        The reordered document, and its class: `orders(pieces)[class][i]` is the original index of the i-th piece.
    """
    count = int(torch.randint(1, pieces + 1, (), generator=generator))
    cuts = (torch.randperm(len(tokens_N) - 1, generator=generator)[: count - 1] + 1).sort().values.tolist()
    order = tuple(torch.randperm(count, generator=generator).tolist())
    parts = tokens_N.tensor_split(cuts)
    return torch.cat([parts[i] for i in order]), orders(pieces).index(order)
