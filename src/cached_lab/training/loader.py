"""Order of the training data: a pure function of (seed, epoch), whatever the number of processes, pieces or workers.

A step number is the position in the data: step s takes rows [p * batch, (p + 1) * batch) of epoch e's permutation,
where e, p = divmod(s, batches in an epoch). Rows that do not fill a batch wait for another epoch's permutation.
Augmentation of row i in epoch e draws from generators seeded by (seed, e, i), so it does not depend on who loads the
row, or when.

Repeated augmentation (Hoffer et al., arXiv:1901.09335; as DeiT's sampler, arXiv:2012.12877, does it) takes each image
of a batch several times, changed in different ways: an epoch has as many rows as without, of fewer images.
"""

from __future__ import annotations

import contextlib
import random
import signal
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

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
"""(epoch, index) of one row, or (epoch, index, copy) where rows are repeated."""
_IN_A_ROW = 100
"""Files in a row that may be bad before loading gives up."""
_NAMED = 20
"""Bad files that are named on the screen while a run goes on; all of them are counted."""


def mixed_seed(*numbers: int) -> int:
    """A well-mixed 63-bit seed from a few whole numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))


@contextlib.contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """The generators of Python, numpy and torch (CPU) seeded for a `with` block, and put back after it."""
    seed = mixed_seed(*numbers)
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # The CPU generator itself: torch.manual_seed would seed CUDA too, and nothing would put that back.
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


class Loaded(NamedTuple):
    """What a loading process hands over: a batch (None when no row of it can be used), and the bad files it met."""

    batch: Any
    bad: tuple[BadFile, ...]


class SeededRows(TorchDataset[tuple[Tensor, int]]):
    """Rows of a dataset by (epoch, index); augmentation is seeded per row and leaves the global generators alone.

    Where the dataset says `bad_files: skip`, the next row that can be used stands in for one that cannot, so that
    batches keep their size; the files that were met are kept in `met` until they are handed over.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self.met: list[BadFile] = []

    def __getitem__(self, key: Key) -> tuple[Tensor, int]:
        if not getattr(self.dataset, "augment", False):
            return self._usable(key[1])
        with seeded(self.seed, *key):
            return self._usable(key[1])

    def _usable(self, index: int) -> tuple[Tensor, int]:
        for further in range(_IN_A_ROW):
            try:
                return self.dataset[(index + further) % len(self.dataset)]
            except BadFile as error:
                if not skips_bad_files(self.dataset):
                    raise
                self.met.append(error)
        raise ValueError(
            f"{_IN_A_ROW} files in a row cannot be used, the last {self.met[-1].file} ({self.met[-1].reason}); fetch "
            "the data again"
        )


class _Batches(TorchDataset[Loaded]):
    """Batches of rows. Errors travel as values: from a loading process they would arrive as text."""

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
        if items and getattr(self.rows, "fills", False):
            items += [items[place % len(items)] for place in range(len(keys) - len(items))]
        return Loaded(self.dataset.collate(items) if items else None, tuple(bad))


def skips_bad_files(dataset: Any) -> bool:
    """Whether loading goes on without files that cannot be used."""
    return getattr(dataset, "bad_files", "stop") == "skip"


def opened(loaded: Loaded, dataset: Any) -> Any:
    """The batch, after its bad files have been noted in `dataset.bad_found`; a warning names the first ones.

    Raises:
        BadFile: the dataset says that one stops the run.
    """
    for error in loaded.bad:
        if not skips_bad_files(dataset):
            raise error
        found = dataset.bad_found
        if error.file not in found and len(found) < _NAMED:
            number = len(found) + 1
            more = "; more are counted, not named" if number == _NAMED else ""
            warnings.warn(
                f"skipped {error.file}: {error.reason} (bad file {number}{more})", RuntimeWarning, stacklevel=2
            )
        found[error.file] = error.reason
    return loaded.batch


class Order(Protocol):
    """Rows of one piece of a batch after the other, endlessly: a pure function of `seed`, from step `start` on."""

    seed: int
    start: int

    def __iter__(self) -> Iterator[list[Key]]: ...


class Share(NamedTuple):
    """What a process takes of each batch: as many rows as every other process, in pieces."""

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
"""All of a batch, in one piece."""


class TrainingOrder(Sampler[list[Key]]):
    """Endless pieces of batches for one process, beginning at a step.

    Args:
        size: rows of the dataset.
        batch_size: rows of one step, over all processes and pieces.
        seed: seed of the permutations.
        start: steps already taken.
        share: what this process takes of a batch.
        repeats: how often each image of a batch is in it.

    Raises:
        ValueError: the batch does not divide evenly, or is larger than the dataset.
    """

    def __init__(
        self, size: int, batch_size: int, seed: int, start: int = 0, share: Share = WHOLE, repeats: int = 1
    ) -> None:
        if batch_size % repeats:
            raise ValueError(
                f"training.batch_size={batch_size} must be a multiple of training.repeats={repeats}: "
                "each image of a batch is in it so often"
            )
        share.check(batch_size)
        if batch_size > size:
            raise ValueError(
                f"training.batch_size={batch_size} exceeds the {size} training rows; choose a smaller batch"
            )
        self.size, self.batch_size, self.seed, self.start = size, batch_size, seed, start
        self.share, self.repeats = share, repeats
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.long)

    def rows(self, step: int) -> list[Key]:
        """All rows of one step, over all processes."""
        epoch, position = divmod(step, self.size // self.batch_size)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(mixed_seed(self.seed, epoch))
            self._epoch, self._order = (epoch, torch.randperm(self.size, generator=generator))
        images = self.batch_size // self.repeats
        chosen = self._order[position * images : (position + 1) * images].tolist()
        if self.repeats == 1:
            return [(epoch, index) for index in chosen]
        # Copies lie far apart, so that processes see different ones and mixing meets different images.
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


def training_batches(
    dataset: Any, order: Order, workers: int = 0, pin_memory: bool = False, rows: Any = None
) -> Iterator[Any]:
    """Endless batches (`dataset.collate`) in the given order.

    Args:
        workers: loading processes. pin_memory: batches in memory from which a GPU copies while it computes.
        rows: what makes items of the keys of the order; None for `SeededRows`.

    Raises:
        BadFile: a file cannot be used, and the dataset does not say to skip such files.
    """
    rows = SeededRows(dataset, order.seed) if rows is None else rows
    yield from _loaded(dataset, rows, order, workers, pin_memory)


def _loaded(dataset: Any, rows: Any, batches: Any, workers: int, pin_memory: bool) -> Iterator[Any]:
    """Batches of rows, of which `batches` gives the keys."""
    loader = DataLoader(
        _Batches(dataset, rows),
        batch_size=None,
        sampler=batches,  # an item is a whole batch
        collate_fn=_as_it_is,  # type: ignore[arg-type]
        num_workers=workers,
        worker_init_fn=_ignore_interrupts,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # its own, so that making the iterator does not draw from the global one
    )
    try:
        for loaded in loader:
            yield opened(loaded, dataset)
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise RunFailed(
            f"a loading process ended ({' '.join(str(error).split())}), for want of memory as a rule; take fewer "
            "(training.workers), or none"
        ) from error


def _ignore_interrupts(worker: int) -> None:
    # Ctrl-C reaches every process of the terminal; the training process saves first, and then ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _as_it_is(loaded: Loaded) -> Loaded:
    return loaded


def to_device(tree: T, device: torch.device) -> T:
    """A batch, or a tuple, list or mapping of parts of one, with its tensors on a device; the rest stays as it is."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), tree)  # type: ignore[no-any-return]


def evaluation_batches(
    dataset: Any, batch_size: int, rank: int = 0, world_size: int = 1, workers: int = 0, pin_memory: bool = False
) -> Iterator[Any]:
    """Every row of this process's share exactly once, in order; shares may differ by one row.

    Rows whose file cannot be used are left out where the dataset says so, and noted; see `opened`.

    Raises:
        BadFile: a file cannot be used, and the dataset does not say to skip such files.
    """
    mine = range(rank, len(dataset), world_size)
    batches = [mine[begin : begin + batch_size] for begin in range(0, len(mine), batch_size)]
    for batch in _loaded(dataset, dataset, batches, min(workers, len(batches)), pin_memory):
        if batch is not None:
            yield batch
