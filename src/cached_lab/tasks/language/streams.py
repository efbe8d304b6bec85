"""A corpus as streams: every row of a batch reads its own part of the text, step by step, from beginning to end.

The documents, in the order of the epoch, are laid end to end and cut into one contiguous part a row. Step s of an epoch
gives each row its next tokens, so the place in the data is a function of the step number. Every token is predicted
exactly once an epoch: rows that are through wait for the others as padding.

With `align` each document begins at a multiple of so many tokens of its row, where the memory of a row is reset; the
places up to there are padding. With `packed` each begins where the one before it ends, and a loop is told the ids of
documents, so that each is read with a memory of its own (`models/documents.py`).

Legend: B rows, N tokens of a step, S segments of a step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cached_lab.data.text import TextDataset
from cached_lab.training.loader import to_device
from cached_lab.training.settings import TrainingConfig
from cached_transformers.layers.token_loss import IGNORED

_EMPTIED = 1
"""Tells the rows that are drawn at a step from the order of documents that is drawn for an epoch."""


class StreamBatch(NamedTuple):
    """What each row reads at one step.

    Attributes:
        inputs, targets: token ids (B, N); targets are -100 at padding.
        reset: bool (B, S), rows that begin anew at the first token of each segment of `align` tokens; (B, 1), at the
            first token of the step, where documents are not aligned.
        padding: bool (B, N), True = padding; None where there is none.
        positions: places of the targets in their documents, long (B, N), from 0.
        documents: which documents they are of, long (B, N), in order of the split.
        tokens: number of targets, over all rows of the step and not only those asked for.
        packed: documents begin with an empty memory wherever in a row that is.
    """

    inputs: Tensor
    targets: Tensor
    reset: Tensor
    padding: Tensor | None
    positions: Tensor
    documents: Tensor
    tokens: int
    packed: bool = False

    @property
    def told(self) -> Tensor | None:
        """Ids of documents for a loop, -1 at padding, on the CPU, where they keep no device waiting; None for none."""
        return self.documents.masked_fill(self.targets == IGNORED, -1) if self.packed else None

    def moved(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Inputs, targets, resets and padding on a device."""
        return to_device((self.inputs, self.targets, self.reset, self.padding), device)

    def emptied(self, rows_B: Tensor) -> StreamBatch:
        """The batch with a reset of some rows (bool) at its first token, wherever in a document that is."""
        reset = self.reset.clone()
        reset[:, 0] |= rows_B
        return self._replace(reset=reset)


def rows_to_empty(settings: TrainingConfig, step: int) -> Tensor:
    """Which rows of the batch of a step begin it with an empty memory, (B,) bool: a function of seed and step alone."""
    generator = np.random.Generator(np.random.PCG64([settings.seed, step, _EMPTIED]))
    return torch.from_numpy(generator.random(settings.batch_size) < settings.reset_rows)


def grain(data: TextDataset, segment: int, settings: TrainingConfig) -> int:
    """Multiples of how many tokens documents begin at: of a segment, or of all that several passes read."""
    if data.reset != "document":
        return 0
    return segment * settings.segments if settings.passes > 1 else segment


class Streams:
    """Rows of a corpus.

    Args:
        tokens: ids (size,). starts: where each document begins.
        start: id that stands before the first token.
        rows: B. length: N, tokens of a row in one step.
        unit: steps at the end of an epoch are cut to the shortest multiple of it that holds what is left.
        align: documents begin at multiples of so many tokens of their row, with a reset; 0 lets rows run on.
        packed: documents begin anywhere, each as in a row of its own.
        seed: for an order of documents drawn anew each epoch; None keeps theirs.

    Raises:
        ValueError: more rows than tokens, or than segments of documents; `align` does not divide `length`, or stands
            beside `packed`.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        starts: np.ndarray,
        start: int,
        rows: int,
        length: int,
        *,
        unit: int = 1,
        align: int = 0,
        packed: bool = False,
        seed: int | None = None,
    ) -> None:
        if align and packed:
            raise ValueError(f"align={align} pads documents to segments, and packed=True none; take one of the two")
        if align and length % align:
            raise ValueError(f"align={align} must divide length={length}, so that documents begin with a segment")
        if rows > len(tokens):
            raise ValueError(f"a batch of {rows} rows exceeds the {len(tokens)} tokens of the text; take fewer rows")
        self.tokens, self.starts, self.start = tokens, starts, start
        self.rows, self.length, self.unit, self.align, self.seed = rows, length, unit, align, seed
        self.packed, self._apart = packed, packed or bool(align)
        self.lengths = np.diff(np.append(starts, len(tokens)))
        self._grain = align or 1
        total = int(self._room(self.lengths).sum()) // self._grain
        if rows > total:
            raise ValueError(
                f"a batch of {rows} rows exceeds the {total} segments of {align} tokens that the documents fill; "
                "take fewer rows or shorter segments"
            )
        self.bounds = np.arange(rows + 1) * total // rows * self._grain
        self.steps = -(-int(np.diff(self.bounds).max()) // length)
        """Steps in an epoch."""
        self._epoch = -1

    def _room(self, lengths: np.ndarray) -> np.ndarray:
        """Places that documents of these lengths take."""
        return -(-lengths // self._grain) * self._grain

    def _lay(self, epoch: int) -> None:
        """Put the documents in the order of the epoch."""
        if epoch == self._epoch:
            return
        order = np.arange(len(self.lengths))
        if self.seed is not None:
            order = np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(order)
        self._epoch, self._order = epoch, order
        self._places = np.concatenate([[0], np.cumsum(self._room(self.lengths[order]))])

    def batch(self, step: int, rows: slice = slice(None)) -> StreamBatch:
        """What the rows of a slice read at a step, counted over all epochs."""
        epoch, turn = divmod(step, self.steps)
        self._lay(epoch)
        begin = self.bounds[:-1] + turn * self.length
        left = np.clip(self.bounds[1:] - begin, 0, self.length)
        width = min(self.length, -(-int(left.max()) // self.unit) * self.unit)
        places_BN = begin[:, None] + np.arange(width)
        valid_BN = np.arange(width) < left[:, None]
        document_BN = np.searchsorted(self._places, places_BN, "right") - 1
        document_BN = np.minimum(document_BN, len(self._order) - 1)
        own_BN = self._order[document_BN]
        offset_BN = places_BN - self._places[document_BN]
        valid_BN &= offset_BN < self.lengths[own_BN]
        count = int(valid_BN.sum())

        places_BN, valid_BN, own_BN, offset_BN, document_BN = (
            t[rows] for t in (places_BN, valid_BN, own_BN, offset_BN, document_BN)
        )
        index_BN = np.where(valid_BN, self.starts[own_BN] + offset_BN, 0)
        targets_BN = np.where(valid_BN, self.tokens[index_BN].astype(np.int64), IGNORED)
        # Before the first token of a document stands the last of the document before it, or, after a reset, nothing.
        before_BN = self._order[np.maximum(document_BN - 1, 0)]
        last_BN = self.tokens[self.starts[before_BN] + self.lengths[before_BN] - 1].astype(np.int64)
        last_BN = np.where((document_BN == 0) | self._apart, self.start, last_BN)
        inputs_BN = np.where(offset_BN > 0, self.tokens[np.maximum(index_BN - 1, 0)].astype(np.int64), last_BN)
        inputs_BN = np.where(valid_BN, inputs_BN, self.start)
        fresh_BS = ((offset_BN == 0) & valid_BN & self._apart)[:, :: self.align or width]
        fresh_BS[:, 0] |= turn == 0
        padded = self.align or not valid_BN.all()
        return StreamBatch(
            inputs=torch.from_numpy(inputs_BN),
            targets=torch.from_numpy(targets_BN),
            reset=torch.from_numpy(fresh_BS),
            padding=torch.from_numpy(~valid_BN) if padded else None,
            positions=torch.from_numpy(offset_BN),
            documents=torch.from_numpy(own_BN),
            tokens=count,
            packed=self.packed,
        )
