"""Training batches of images in shards that are read one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from cached_lab.training.loader import TrainingOrder, mixed_seed


class WindowedOrder(TrainingOrder):
    """Batches from shards in a permuted order, with rows permuted within windows of consecutive rows.

    The order is a function of seed and epoch, as that of `TrainingOrder`. A window may reach into the next shard.

    Args:
        starts: first row of each shard, ascending. window: rows. others: see `TrainingOrder`.
    """

    def __init__(self, starts: np.ndarray, window: int, size: int, *args: Any, **options: Any) -> None:
        super().__init__(size, *args, **options)
        self._shards = np.split(np.arange(size), starts[1:])
        self._window = window

    def rows(self, step: int) -> list[tuple[int, ...]]:
        epoch = step // (self.size // self.batch_size)
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64(mixed_seed(self.seed, epoch)))
            order = np.concatenate([self._shards[place] for place in generator.permutation(len(self._shards))])
            for begin in range(0, self.size, self._window):
                generator.shuffle(order[begin : begin + self._window])
            self._epoch, self._order = epoch, torch.from_numpy(order)
        return super().rows(step)
