"""Batches of streamed data: the training process reads examples in order, loading processes turn them into inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import Dataset, Sampler

from cached_lab.data.shard_order import Dealer, Parts, ShardSet, as_tensor, from_tensor

from .distributed import World
from .loader import Share, seeded


class StreamKey(NamedTuple):
    """An example, with the part and number that seed its augmentation."""

    part: int
    number: int
    example: Any


class StreamedOrder(Sampler[list[StreamKey]]):
    """Endless pieces of batches for one process; the counterpart of `TrainingOrder`.

    Args:
        data: shards of examples. batch_size: rows of one step, over all processes and pieces.
        seed: seed of order and augmentation. share: share of this process.
        parts, window: see `Dealer`.

    Raises:
        ValueError: the batch does not divide evenly into pieces or parts, or there are more parts than shards.
    """

    def __init__(self, data: ShardSet[Any], batch_size: int, seed: int, share: Share, parts: int, window: int) -> None:
        share.check(batch_size)
        self.seed, self.start = seed, 0
        self._rows = batch_size // share.processes
        self._piece = self._rows // share.accumulate
        self._parts = Parts.of_rows(parts, batch_size, share.rank * self._rows, self._rows)
        self._skipped = share.rank * self._rows - self._parts.own.start * self._parts.each
        self._dealers = {part: Dealer(data, part, parts, window, seed) for part in self._parts.own}
        self._after: dict[int, dict[int, dict[str, Any]]] = {}  # positions after each step, since loaders prefetch

    def __iter__(self) -> Iterator[list[StreamKey]]:
        step = self.start
        while True:
            rows = [
                StreamKey(part, dealer.given, next(dealer))
                for part, dealer in self._dealers.items()
                for _ in range(self._parts.each)
            ][self._skipped : self._skipped + self._rows]
            step += 1
            self._after[step] = {part: dealer.state() for part, dealer in self._dealers.items()}
            for begin in range(0, self._rows, self._piece):
                yield rows[begin : begin + self._piece]

    def state_dict(self, step: int, world: World) -> dict[str, Tensor]:
        """Return the positions of all parts after a step, over all processes, which must all call this."""
        self._after = {later: states for later, states in self._after.items() if later >= step}
        mine = {str(part): as_tensor(state) for part, state in self._after[step].items()}
        return {name: tensor for one in world.gather(mine) for name, tensor in one.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore positions with any number of processes (ValueError: they are of other shards)."""
        for part, dealer in self._dealers.items():
            dealer.go_on(from_tensor(state[str(part)]))


class SeededExamples(Dataset[tuple[Tensor, int]]):
    """Inputs of examples, with augmentation seeded by part and number.

    Attributes:
        fills: usable rows of a batch are repeated in turn to replace unusable ones.
    """

    fills = True

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, key: StreamKey) -> tuple[Tensor, int]:
        with seeded(self.seed, key.part, key.number):
            return self.dataset[key.example]  # type: ignore[no-any-return]
