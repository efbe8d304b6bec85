"""A corpus as streams: each row of a batch reads its own part of the text, step by step, from beginning to end.

The documents, in the order of the epoch, are concatenated and divided into one contiguous part per row. Step s of an
epoch gives each row its next tokens, so that the position is a function of the step number. Every token is predicted
exactly once per epoch; rows that finish early are padded.

With `align` each document begins at a multiple of `align` tokens of its row, after padding, where the memory of the row
is reset. With `packed` each begins directly after the previous one, and a loop receives the ids of documents, so that
each is read with its own memory (`models/documents.py`).

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
"""Seed word of the rows to empty at a step, other than the order of documents in an epoch."""


class StreamBatch(NamedTuple):
    """The rows of one step.

    Attributes:
        inputs, targets: token ids (B, N); targets are -100 at padding.
        reset: bool (B, S), rows with an empty memory at the first token of each segment of `align` tokens; (B, 1), at
            the first token of the step, if documents are not aligned.
        padding: bool (B, N), True = padding; None without any.
        positions: positions of the targets in their documents, long (B, N), from 0.
        documents: documents of the targets, long (B, N), in order of the split.
        tokens: number of targets, over all rows of the step, not only those of this batch.
        packed: documents begin with an empty memory anywhere in a row.
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
        """Ids of documents for a loop, -1 at padding, on the CPU, so that no device waits; None if not packed."""
        return self.documents.masked_fill(self.targets == IGNORED, -1) if self.packed else None

    def moved(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Inputs, targets, resets and padding on a device."""
        return to_device((self.inputs, self.targets, self.reset, self.padding), device)

    def emptied(self, rows_B: Tensor) -> StreamBatch:
        """The batch with a reset of some rows (bool) at its first token, even within a document."""
        reset = self.reset.clone()
        reset[:, 0] |= rows_B
        return self._replace(reset=reset)


def rows_to_empty(settings: TrainingConfig, step: int) -> Tensor:
    """Rows that begin a step with an empty memory, (B,) bool: a function of seed and step."""
    generator = np.random.Generator(np.random.PCG64([settings.seed, step, _EMPTIED]))
    return torch.from_numpy(generator.random(settings.batch_size) < settings.reset_rows)


def grain(data: TextDataset, segment: int, settings: TrainingConfig) -> int:
    """The alignment of documents in tokens: a segment, or all segments that several passes read; 0 for none."""
    if data.reset != "document":
        return 0
    return segment * settings.segments if settings.passes > 1 else segment


class Streams:
    """Rows of a corpus.

    Args:
        tokens: ids (size,). starts: start of each document.
        start: id before the first token.
        rows: B. length: N, tokens of a row in one step.
        unit: steps at the end of an epoch are shortened to a multiple of `unit`.
        align: documents begin at multiples of `align` tokens of their row, with a reset; 0 disables this.
        packed: documents begin anywhere, each with its own memory; not with `align`.
        seed: permutes the documents of each epoch; None keeps their order.

    Attributes:
        steps: in an epoch.

    Raises:
        ValueError: more rows than tokens, or than segments of documents.
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
        self.tokens, self.starts, self.start = tokens, starts, start
        self.rows, self.length, self.unit, self.align, self.seed = rows, length, unit, align, seed
        self.packed, self._apart = packed, packed or bool(align)
        self.lengths = np.diff(np.append(starts, len(tokens)))
        grain = align or 1
        self._room = -(-self.lengths // grain) * grain
        """Tokens of each document, with padding."""
        total = int(self._room.sum()) // grain
        if rows > total:
            parts = f"segments of {align} tokens that the documents fill" if align else "tokens of the text"
            raise ValueError(f"a batch of {rows} rows exceeds the {total} {parts}; take fewer rows or shorter segments")
        self.bounds = np.arange(rows + 1) * total // rows * grain
        self.steps = -(-int(np.diff(self.bounds).max()) // length)
        self._epoch = -1

    def batch(self, step: int, rows: slice = slice(None)) -> StreamBatch:
        """The batch of some rows at a step, counted over all epochs."""
        epoch, turn = divmod(step, self.steps)
        if epoch != self._epoch:
            order = np.arange(len(self.lengths))
            if self.seed is not None:
                order = np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(order)
            self._epoch, self._order = epoch, order
            self._places = np.concatenate([[0], np.cumsum(self._room[order])])
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
        # The input of a document's first token is the last token of the previous document or, after a reset, `start`.
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
