"""Rows of a text read as a stream: each row starts the next document as soon as it has finished one.

A stream has no index and no length, so that a batch is not a function of its step: rows are read step after step, and
their positions are saved with the run. Documents are dealt in the order in which rows need them, row after row, which
depends only on the lengths of documents. A row holds the rest of one document.

Legend: B rows, N tokens of a step, S segments of a step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cached_lab.data.shard_order import Dealer, ShardSet, as_tensor, from_tensor
from cached_lab.data.tokenizers import Tokenizer

from .streams import IGNORED, StreamBatch


class _RowRest(NamedTuple):
    """The rest of a row's document.

    Attributes:
        tokens: ids (left,). before: the id before them. offset: their position in the document. document: its number,
            from 0; -1 before the first.
    """

    tokens: np.ndarray
    before: int
    offset: int
    document: int


class StreamedRows:
    """The rows of a batch; the counterpart of `Streams` for a stream. Every process reads all rows, and takes its own.

    Args:
        data: shards of documents. tokenizer: encodes them.
        rows: B. length: N. align: documents begin at multiples of `align` tokens of their row, with a reset; 0 disables
            this.
        packed: documents begin anywhere, each with its own memory.
        window, seed: see `Dealer`.
    """

    def __init__(
        self,
        data: ShardSet[str],
        tokenizer: Tokenizer,
        rows: int,
        length: int,
        *,
        align: int = 0,
        packed: bool = False,
        window: int = 1,
        seed: int | None = None,
    ) -> None:
        self.dealer = Dealer(data, window=window, seed=seed)
        self.tokenizer, self.length, self.align, self.packed = tokenizer, length, align, packed
        self.rows = [_RowRest(np.zeros(0, dtype=np.int32), tokenizer.start, 0, -1) for _ in range(rows)]
        self._step: int | None = None

    def batch(self, step: int, rows: slice) -> StreamBatch:
        """The batch of some rows at a step; steps are consecutive.

        Raises:
            RuntimeError: neither the last step nor the next one.
        """
        if step != self._step:
            if self._step is not None and step != self._step + 1:
                raise RuntimeError(f"step={step} of a stream does not follow step {self._step}")
            self._step, self._batch = step, self._next()
        return StreamBatch(*(part[rows] if isinstance(part, Tensor) else part for part in self._batch))  # type: ignore[arg-type]

    def _next(self) -> StreamBatch:
        """The next tokens of all rows."""
        align, width = self.align, self.length
        shape = (len(self.rows), width)
        inputs_BN, targets_BN = np.full(shape, self.tokenizer.start, np.int64), np.full(shape, IGNORED, np.int64)
        offset_BN, document_BN = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        fresh_BS = np.zeros((len(self.rows), width // align if align else 1), bool)
        for number, row in enumerate(self.rows):
            fresh_BS[number, 0] |= row.document < 0
            place = 0
            while place < width:
                if not len(row.tokens):
                    row = self._begun(row)
                    if align:
                        fresh_BS[number, place // align] = True
                    fresh_BS[number, 0] |= self.packed and not place
                count = min(width - place, len(row.tokens))
                part, own = slice(place, place + count), row.tokens[:count]
                inputs_BN[number, part] = np.append(row.before, own)[:count]
                targets_BN[number, part] = own
                offset_BN[number, part] = np.arange(row.offset, row.offset + count)
                document_BN[number, part] = row.document
                row = row._replace(tokens=row.tokens[count:], before=int(own[-1]), offset=row.offset + count)
                place += count
                if align and not len(row.tokens):
                    place = -(-place // align) * align
            self.rows[number] = row._replace(tokens=row.tokens.copy())  # frees the part of the document already read
        targets = torch.from_numpy(targets_BN)
        return StreamBatch(
            inputs=torch.from_numpy(inputs_BN),
            targets=targets,
            reset=torch.from_numpy(fresh_BS),
            padding=targets == IGNORED if align else None,
            positions=torch.from_numpy(offset_BN),
            documents=torch.from_numpy(document_BN),
            tokens=int((targets_BN != IGNORED).sum()),
            packed=self.packed,
        )

    def _begun(self, row: _RowRest) -> _RowRest:
        """The row with the next document that has a token."""
        while not len(tokens := self.tokenizer.encode(next(self.dealer)).astype(np.int32)):
            pass
        before = self.tokenizer.start if self.align or self.packed else row.before
        return _RowRest(tokens, before, 0, self.dealer.given - 1)

    def state_dict(self) -> dict[str, Tensor]:
        """The position of the dealer and the rest of each row's document."""
        facts = [(len(row.tokens), row.before, row.offset, row.document) for row in self.rows]
        left = torch.from_numpy(np.concatenate([row.tokens for row in self.rows]))
        return {"dealer": as_tensor(self.dealer.state()), "rows": torch.tensor(facts), "left": left}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Resume from a `state_dict` (ValueError: other shards)."""
        self.dealer.go_on(from_tensor(state["dealer"]))
        lefts = state["left"].split(state["rows"][:, 0].tolist())
        facts = state["rows"][:, 1:].tolist()
        self.rows = [_RowRest(left.numpy().copy(), *fact) for left, fact in zip(lefts, facts, strict=True)]
        self._step = None
