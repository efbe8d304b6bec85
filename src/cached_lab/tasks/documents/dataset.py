"""Base class of the data sets of documents: a label each, a length in segments, and padding.

Legend: B rows, N tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cached_lab.data.dataset import Batch, LabelledDataset
from cached_lab.data.splits import SPLITS, check_split
from cached_lab.data.tokenizers import Tokenizer
from cached_transformers.checks import at_least_one


class DocumentDataset(LabelledDataset):
    """Token sequences with a label each, read in segments of `segment_length` tokens; the last may be shorter. Items
    are (token ids long (N,), label).

    Args:
        name, split, labels, classes: see `LabelledDataset`.
        vocabulary: number of token ids.
        tokenizer: from text to ids and back; None for documents that are no text.

    Attributes:
        task: name of the training task.
        segment_length: tokens in a segment. segments: of the longest document. Subclasses set them before.
        limit: most segments of an item; None for whole documents.
    """

    task = "documents"
    segment_length: int
    segments: int
    limit: int | None = None

    def __init__(
        self,
        name: str,
        split: str,
        labels: np.ndarray,
        classes: int,
        *,
        vocabulary: int,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        super().__init__(name, split, labels, classes)
        self.vocabulary = vocabulary
        self.tokenizer = tokenizer  # type: ignore[assignment]  # replaces the option that names it

    def document(self, index: int, segments: int | None = None, epoch: int = 0) -> tuple[Tensor, int]:
        """One document: tokens (N,), and its label.

        Args:
            segments: most segments; None for the whole document.
            epoch: of training; generated documents differ between epochs.
        """
        raise NotImplementedError("abstract: a data set of documents returns them")

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.document(index, self.limit)

    def collate(self, items: Sequence[tuple[Tensor, int]]) -> Batch:
        """Pad documents to the longest; there is no mask without padding."""
        lengths = torch.tensor([len(tokens_N) for tokens_N, _ in items])
        inputs_BN = torch.nn.utils.rnn.pad_sequence([tokens_N for tokens_N, _ in items], batch_first=True)
        padding_BN = torch.arange(inputs_BN.shape[1]) >= lengths[:, None]
        targets_B = torch.tensor([label for _, label in items], dtype=torch.long)
        return Batch(inputs_BN, targets_B, padding_BN if padding_BN.any() else None)

    def describe(self) -> dict[str, object]:
        facts = {"vocabulary": self.vocabulary, "max_length": self.segment_length, "segments": self.segments}
        return {**super().describe(), **facts}

    def check_segments(self) -> None:
        """Refuse a length of segments, or a number of them, below 1 (ValueError)."""
        at_least_one("", **{"data.segment_length": self.segment_length})
        at_least_one("; null reads whole documents", **{"data.segments": self.segments})

    def generated_size(self, sizes: tuple[int, int, int], seed: int) -> int:
        """The number of generated documents (ValueError: a split without any, segments below 1, a negative seed)."""
        at_least_one("", **{f"data.{split}_size": size for split, size in zip(SPLITS, sizes, strict=True)})
        self.check_segments()
        if seed < 0:
            raise ValueError(f"data.seed={seed} must not be negative")
        return sizes[SPLITS.index(check_split(self.split))]
