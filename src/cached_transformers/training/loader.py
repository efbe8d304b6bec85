"""Order of the training data: a pure function of (seed, epoch), whatever the number of processes, pieces or workers.

A step number is the position in the data: step s takes rows [p * batch, (p + 1) * batch) of epoch e's permutation,
where e, p = divmod(s, batches in an epoch). Rows that do not fill a batch wait for another epoch's permutation.
Augmentation of row i in epoch e draws from a generator seeded by (seed, e, i), so it does not depend on who loads the
row, or when.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from torch.utils.data import Dataset as TorchDataset

Key = tuple[int, int]
"""(epoch, index) of one row."""


def mixed_seed(*numbers: int) -> int:
    """A well-mixed 63-bit seed from a few whole numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


class SeededRows(TorchDataset[tuple[Tensor, int]]):
    """Rows of a dataset by (epoch, index); augmentation is seeded per row and leaves torch's global generator alone."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __getitem__(self, key: Key) -> tuple[Tensor, int]:
        epoch, index = key
        if not getattr(self.dataset, "augment", False):
            return self.dataset[index]
        before = torch.get_rng_state()
        # The CPU generator itself: torch.manual_seed would seed CUDA too, and nothing would put that back.
        torch.default_generator.manual_seed(mixed_seed(self.seed, epoch, index))
        try:
            return self.dataset[index]
        finally:
            torch.set_rng_state(before)


class TrainingOrder(Sampler[list[Key]]):
    """Endless pieces of batches for one process, beginning at a step.

    Args:
        size: rows of the dataset.
        batch_size: rows of one step, over all processes and pieces.
        seed: seed of the permutations.
        start: steps already taken.
        rank, world_size: this process and the number of processes.
        accumulate: pieces into which each process divides its share of a batch.

    Raises:
        ValueError: the batch does not divide evenly, or is larger than the dataset.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        seed: int,
        start: int = 0,
        rank: int = 0,
        world_size: int = 1,
        accumulate: int = 1,
    ) -> None:
        if batch_size % (world_size * accumulate):
            raise ValueError(
                f"training.batch_size={batch_size} must be a multiple of {world_size} processes x "
                f"training.accumulate={accumulate}"
            )
        if batch_size > size:
            raise ValueError(
                f"training.batch_size={batch_size} exceeds the {size} training rows; choose a smaller batch"
            )
        self.size, self.batch_size, self.seed, self.start = (size, batch_size, seed, start)
        self.rank, self.world_size, self.accumulate = rank, world_size, accumulate
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.long)

    def rows(self, step: int) -> list[Key]:
        """All rows of one step, over all processes."""
        epoch, position = divmod(step, self.size // self.batch_size)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(mixed_seed(self.seed, epoch))
            self._epoch, self._order = (epoch, torch.randperm(self.size, generator=generator))
        chosen = self._order[position * self.batch_size : (position + 1) * self.batch_size]
        return [(epoch, index) for index in chosen.tolist()]

    def __iter__(self) -> Iterator[list[Key]]:
        share = self.batch_size // self.world_size
        piece = share // self.accumulate
        step = self.start
        while True:
            mine = self.rows(step)[self.rank * share : (self.rank + 1) * share]
            for begin in range(0, share, piece):
                yield mine[begin : begin + piece]
            step += 1


class GroupedOrder(TrainingOrder):
    """Batches of rows of one group as far as they go (images of one aspect ratio need little padding).

    Within an epoch each group's rows keep the order of the permutation; what fills no batch of its group goes into
    mixed ones, and all batches are dealt in an order of their own. Every row has the chance it has in `TrainingOrder`.

    Args:
        groups: group of each row, integers (size,). Others: as in `TrainingOrder`.
    """

    def __init__(self, groups: np.ndarray, *args: Any, **options: Any) -> None:
        super().__init__(len(groups), *args, **options)
        self._groups, self._dealt = torch.from_numpy(np.asarray(groups)), -1

    def rows(self, step: int) -> list[Key]:
        epoch, position = divmod(step, self.size // self.batch_size)
        if epoch != self._dealt:
            generator = torch.Generator().manual_seed(mixed_seed(self.seed, epoch))
            order, batch = torch.randperm(self.size, generator=generator), self.batch_size
            parts = [order[self._groups[order] == group] for group in self._groups.unique()]
            whole = [part[: len(part) // batch * batch] for part in parts]
            rest = torch.cat([part[len(part) // batch * batch :] for part in parts])
            rest = rest[torch.randperm(len(rest), generator=generator)]
            batches = torch.cat([*whole, rest[: len(rest) // batch * batch]]).view(-1, batch)
            self._batches = batches[torch.randperm(len(batches), generator=generator)]
            self._dealt = epoch
        return [(epoch, index) for index in self._batches[position].tolist()]


def training_batches(dataset: Any, order: TrainingOrder, workers: int = 0) -> Iterator[Any]:
    """Endless batches (`dataset.collate`) in the given order."""
    return iter(
        DataLoader(
            SeededRows(dataset, order.seed),
            batch_sampler=order,
            collate_fn=dataset.collate,
            num_workers=workers,
            worker_init_fn=_ignore_interrupts,
            generator=torch.Generator(),  # its own, so that making the iterator does not draw from the global one
        )
    )


def _ignore_interrupts(worker: int) -> None:
    # Ctrl-C reaches every process of the terminal; the training process saves first, and then ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def evaluation_batches(dataset: Any, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
    """Every row of this process's share exactly once, in order; shares may differ by one row."""
    mine = range(rank, len(dataset), world_size)
    for begin in range(0, len(mine), batch_size):
        yield dataset.collate([dataset[index] for index in mine[begin : begin + batch_size]])
