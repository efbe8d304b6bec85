"""Data loading in an order that is a function of (seed, epoch), whatever the number of processes, pieces or workers.

Step s takes rows [p * batch, (p + 1) * batch) of the permutation of epoch e, with e, p = divmod(s, batches per epoch);
an incomplete last batch is dropped. Augmentation of row i in epoch e is seeded by (seed, e, i), so that it does not
depend on the loading process.

Repeated augmentation (Hoffer et al., arXiv:1901.09335; DeiT, arXiv:2012.12877) takes each image of a batch several
times with different augmentation: an epoch has as many rows, of fewer images.
"""

from __future__ import annotations

import contextlib
import copy
import random
import signal
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Sampler
from torch.utils.data import Dataset as TorchDataset

from cached_lab.data.image_files import BadFile

from .interruption import RunFailed

T = TypeVar("T")
Key = tuple[int, ...]
"""(epoch, index) of a row, or (epoch, index, copy) with repeated augmentation."""
_MAX_BAD_IN_A_ROW = 100
_MAX_NAMED = 20
"""Bad files that are named on the screen; all are counted."""


def mixed_seed(*numbers: int) -> int:
    """Mix integers into a 63-bit seed."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


@contextlib.contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Seed the generators of Python, numpy and torch (CPU) for a `with` block, and restore them."""
    seed = mixed_seed(*numbers)
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # The CPU generator only: torch.manual_seed would also seed CUDA, which is not restored here.
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


class Loaded(NamedTuple):
    """A batch (None without usable rows), and the bad files it met."""

    batch: Any
    bad: tuple[BadFile, ...]


class SeededRows(TorchDataset[tuple[Tensor, int]]):
    """Rows of a dataset by (epoch, index), with augmentation seeded per row.

    With `bad_files: skip`, the next usable row replaces an unusable one, so that batches keep their size; `met` holds
    the bad files until the batch is complete.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        self.met: list[BadFile] = []

    def __getitem__(self, key: Key) -> tuple[Tensor, int]:
        if not getattr(self.dataset, "augment", False):
            return self._usable(key[1])
        with seeded(self.seed, *key):
            return self._usable(key[1])

    def _usable(self, index: int) -> tuple[Tensor, int]:
        for further in range(_MAX_BAD_IN_A_ROW):
            try:
                return self.dataset[(index + further) % len(self.dataset)]
            except BadFile as error:
                if not skips_bad_files(self.dataset):
                    raise
                self.met.append(error)
        last = self.met[-1]
        raise ValueError(f"{_MAX_BAD_IN_A_ROW} files in a row cannot be used, the last {last.file} ({last.reason})")


class _Batches(TorchDataset[Loaded]):
    """Batches of rows. Errors are returned as values, since a loading process would send them as text."""

    def __init__(self, dataset: Any, rows: Any) -> None:
        self.dataset, self.rows = dataset, rows

    def __getitem__(self, keys: Sequence[Any]) -> Loaded:
        items, bad = [], []
        for key in keys:
            try:
                items.append(self.rows[key])
            except BadFile as error:
                bad.append(error)
        if isinstance(self.rows, SeededRows):
            bad, self.rows.met = bad + self.rows.met, []
        return Loaded(self.dataset.collate(items) if items else None, tuple(bad))


def skips_bad_files(dataset: Any) -> bool:
    """Return True if unusable files are skipped."""
    return getattr(dataset, "bad_files", "stop") == "skip"


def opened(loaded: Loaded, dataset: Any) -> Any:
    """Return the batch after recording its bad files in `dataset.bad_found` and warning about the first ones.

    Raises:
        BadFile: bad files are not skipped.
    """
    for error in loaded.bad:
        if not skips_bad_files(dataset):
            raise error
        found = dataset.bad_found
        if error.file not in found and len(found) < _MAX_NAMED:
            text = f"skipped {error.file}: {error.reason} (bad file {len(found) + 1})"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        found[error.file] = error.reason
    return loaded.batch


class Share(NamedTuple):
    """Share of each batch that a process takes: an equal number of rows, in pieces."""

    rank: int = 0
    processes: int = 1
    accumulate: int = 1

    def check(self, batch_size: int) -> None:
        """Refuse a batch that does not divide evenly (ValueError)."""
        if batch_size % (self.processes * self.accumulate):
            raise ValueError(
                f"training.batch_size={batch_size} must be a multiple of {self.processes} processes x "
                f"training.accumulate={self.accumulate}"
            )


WHOLE = Share()
"""A whole batch, in one piece."""


class TrainingOrder(Sampler[list[Key]]):
    """Endless pieces of batches for one process, from a step on.

    Args:
        size: rows of the dataset.
        batch_size: rows of one step, over all processes and pieces.
        seed: seed of the permutations. start: number of past steps.
        share: share of this process. repeats: number of copies of each image in a batch.

    Raises:
        ValueError: the batch does not divide evenly, or is larger than the dataset.
    """

    def __init__(
        self, size: int, batch_size: int, seed: int, start: int = 0, share: Share = WHOLE, repeats: int = 1
    ) -> None:
        if batch_size % repeats:
            raise ValueError(f"training.batch_size={batch_size} must be a multiple of training.repeats={repeats}")
        share.check(batch_size)
        if batch_size > size:
            raise ValueError(f"training.batch_size={batch_size} exceeds the {size} training rows; take fewer")
        self.size, self.batch_size, self.seed, self.start = size, batch_size, seed, start
        self.share, self.repeats = share, repeats
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.long)

    def rows(self, step: int) -> list[Key]:
        """Return all rows of one step, over all processes."""
        epoch, position = divmod(step, self.size // self.batch_size)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(mixed_seed(self.seed, epoch))
            self._epoch, self._order = (epoch, torch.randperm(self.size, generator=generator))
        images = self.batch_size // self.repeats
        chosen = self._order[position * images : (position + 1) * images].tolist()
        if self.repeats == 1:
            return [(epoch, index) for index in chosen]
        # Copies are far apart, so that processes see different ones and mixing combines different images.
        return [(epoch, index, copy) for copy in range(self.repeats) for index in chosen]

    def __iter__(self) -> Iterator[list[Key]]:
        mine = self.batch_size // self.share.processes
        piece = mine // self.share.accumulate
        first, step = self.share.rank * mine, self.start
        while True:
            rows = self.rows(step)
            for begin in range(first, first + mine, piece):
                yield rows[begin : begin + piece]
            step += 1


class GroupedOrder(TrainingOrder):
    """Batches of rows of one group where possible (images of one aspect ratio need little padding).

    Within an epoch each group keeps the order of the permutation, rows that fill no batch of their group form mixed
    batches, and the batches are shuffled. Every row is as likely as in `TrainingOrder`.

    Args:
        groups: group of each row, integers (size,). others: see `TrainingOrder`.
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


def training_batches(dataset: Any, order: Any, workers: int = 0, pin_memory: bool = False) -> Iterator[Any]:
    """Return endless batches (`dataset.collate`) in the given order.

    Args:
        order: yields keys of a piece, such as a `TrainingOrder`.
        workers: loading processes. pin_memory: use page-locked memory for copies to a GPU.

    Raises:
        BadFile: a file cannot be used, and bad files are not skipped.
    """
    return _loaded(dataset, SeededRows(dataset, order.seed), order, workers, pin_memory)


def _loaded(dataset: Any, rows: Any, batches: Any, workers: int, pin_memory: bool) -> Iterator[Any]:
    """Yield batches of the rows whose keys `batches` yields."""
    loader = DataLoader(
        _Batches(dataset, rows),
        batch_size=None,
        sampler=batches,  # an item is a whole batch
        collate_fn=copy.copy,  # as it is
        num_workers=workers,
        worker_init_fn=_ignore_interrupts,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # so that the iterator does not use the global one
    )
    try:
        for loaded in loader:
            yield opened(loaded, dataset)
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise RunFailed(
            f"a loading process ended ({' '.join(str(error).split())}), usually out of memory; use fewer "
            "(training.workers), or none"
        ) from error


def _ignore_interrupts(worker: int) -> None:
    # Ctrl-C reaches every process of the terminal; the training process saves first, and then ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def to_device(tree: T, device: torch.device) -> T:
    """Move the tensors of a nested structure to a device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), tree)  # type: ignore[no-any-return]


def evaluation_batches(
    dataset: Any, batch_size: int, rank: int = 0, world_size: int = 1, workers: int = 0, pin_memory: bool = False
) -> Iterator[Any]:
    """Yield every row of this process' share once, in order; shares may differ by one row.

    Raises:
        BadFile: see `training_batches`.
    """
    mine = range(rank, len(dataset), world_size)
    batches = [mine[begin : begin + batch_size] for begin in range(0, len(mine), batch_size)]
    found = _loaded(dataset, dataset, batches, min(workers, len(batches)), pin_memory)
    yield from (batch for batch in found if batch is not None)
