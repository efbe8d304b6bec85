"""Batches of pairs of similar length, up to a number of tokens (fairseq's max-tokens; arXiv:1904.01038).

As in `loader`, the order is a pure function of (seed, epoch) and a step number is the position in the data. The rows of
an epoch are sorted by the length of the longer side, then of the source in steps of two, and shuffled among equals. A
batch ends where one more row would exceed the tokens; the batches are shuffled. Their bounds depend only on the longer
sides, so every epoch has the same number of batches.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

from cached_lab.training.loader import WHOLE, Key, Share, mixed_seed

TOGETHER = 2  # source lengths that count as equal, so that batches differ between epochs


class TokenOrder(Sampler[list[Key]]):
    """Endless pieces of token batches for one process, beginning at a step.

    Rows of a batch are dealt to processes and pieces, so their numbers do not change the data of a step. A piece
    without a row gets the first one, which must not count; see `empty`.

    Args:
        lengths: tokens of source and target of each row, integers (size, 2).
        tokens: of a step, for source and target each, padding included.
        seed: of the orders. start: steps already taken.
        share: part of a batch for this process.

    Raises:
        ValueError: a row has more tokens than a batch.
    """

    def __init__(self, lengths: np.ndarray, tokens: int, seed: int, start: int = 0, share: Share = WHOLE) -> None:
        self.lengths, self.tokens, self.seed, self.start = np.asarray(lengths), tokens, seed, start
        self.pieces, self.first = share.processes * share.accumulate, share.rank * share.accumulate
        self.accumulate = share.accumulate
        self._longer = self.lengths.max(1)
        if self._longer.max() > tokens:
            raise ValueError(
                f"training.batch_tokens={tokens} is less than the {self._longer.max()} tokens of the longest pair; "
                "raise it, or lower data.max_length"
            )
        self._cuts = _cuts(np.sort(self._longer), tokens)
        self.batches = len(self._cuts) - 1
        self._epoch, self._rows, self._dealt = -1, np.empty(0, np.int64), np.empty(0, np.int64)

    def rows(self, step: int) -> list[Key]:
        """Return all rows of one step, over all processes."""
        epoch, position = divmod(step, self.batches)
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64(mixed_seed(self.seed, epoch)))
            drawn = generator.permutation(len(self.lengths))
            keys = (self.lengths[drawn, 0] // TOGETHER, self._longer[drawn])  # sorts by the last key first
            self._epoch, self._rows = epoch, drawn[np.lexsort(keys)]
            self._dealt = generator.permutation(self.batches)
        batch = self._dealt[position]
        return [(epoch, row) for row in self._rows[self._cuts[batch] : self._cuts[batch + 1]].tolist()]

    def empty(self, step: int, piece: int) -> bool:
        """Return True if a piece of this process has no row."""
        return len(self.rows(step)) <= self.first + piece

    def __iter__(self) -> Iterator[list[Key]]:
        step = self.start
        while True:
            rows = self.rows(step)
            for piece in range(self.first, self.first + self.accumulate):
                yield rows[piece :: self.pieces] or rows[:1]
            step += 1


def _cuts(longer: np.ndarray, tokens: int) -> np.ndarray:
    """Return the bounds of batches of sorted rows, each as large as fits."""
    cuts = [0]
    for place, length in enumerate(longer.tolist()):
        if (place + 1 - cuts[-1]) * length > tokens:
            cuts.append(place)
    return np.array([*cuts, len(longer)])
