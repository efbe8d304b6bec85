"""Interface between trainer and task.

The trainer knows steps, files and signals; a task knows its data, loss, state between steps, scores and files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .config import RunConfig
from .distributed import World, wrap
from .loader import Share, evaluation_batches, training_batches
from .run_files import TOKENIZER
from .sharding import Shards

Scores = dict[str, Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a model."""


class Task:
    """A model with its data, loss and scores.

    Args:
        config: the resolved configuration.
        model: moved to the device by the trainer.
        train, validation: splits of the data.
        world: the processes that train together.

    Attributes:
        share: share of each batch for this process.
        shards: sharded weights, set by the trainer, if any.
        width: number of sums that `backward` returns; the last one is the divisor of the others.
        dynamic: `dynamic` of torch.compile: True if batch sizes vary.
        takes: settings of some tasks that apply, of `curriculum` and `replay`.

    Raises:
        ValueError: settings, or a model, that do not suit the data.
    """

    width: int
    dynamic: ClassVar[bool | None] = None
    takes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: RunConfig, model: nn.Module, train: Any, validation: Any, world: World) -> None:
        self.config, self.settings, self.model, self.world = config, config.training, model, world
        self.data, self.validation = train, validation
        self.shards: Shards | None = None
        for name in ("curriculum", "replay"):
            if name not in self.takes and (value := getattr(self.settings, name)):
                raise ValueError(f"training.{name}={value} does not suit data {config.data['name']!r}; leave it out")
        self.share = Share(world.rank, world.size, self.settings.accumulate)

    def runner(self) -> tuple[nn.Module, Callable[..., Any]]:
        """Return the module that averages gradients over processes, and the callable: the module, or it compiled."""
        wrapped = self.wrapped(self.model)
        return wrapped, torch.compile(wrapped, dynamic=self.dynamic) if self.settings.compile else wrapped

    def wrapped(self, module: nn.Module) -> nn.Module:
        """Wrap the model, or a loop around it, to average gradients over processes."""
        if self.shards is not None:
            return self.shards.wrap(module)
        return wrap(module, self.world)

    def batches(self, step: int) -> Iterator[Any]:
        """Yield endless pieces of batches for this process, from a step on."""
        raise NotImplementedError("abstract: a task yields its batches")

    def backward(self, runner: Callable[..., Any], batch: Any, scaler: torch.amp.GradScaler) -> Tensor:
        """Run forward and backward of one piece; return its sums, NaN if the loss is not finite."""
        raise NotImplementedError("abstract: a task has a loss")

    def finish(self, taken: bool) -> None:
        """End a step; keep its new state only if the step was taken."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state carried to the next step, over all processes, which must all call this."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the state from `state_dict`."""

    def validated(self, scores: Scores) -> None:
        """React to validation scores, e.g. by moving on in a curriculum."""

    def averages(self, total: Tensor) -> Scores:
        """Return scores from added sums."""
        raise NotImplementedError("abstract: a task turns sums into scores")

    def evaluate(self, model: nn.Module, dataset: Any) -> tuple[Scores, list[dict[str, float]]]:
        """Return scores over a whole split, and for documents the loss by position."""
        raise NotImplementedError("abstract: a task scores a split")

    @classmethod
    def baselines(cls, train: Any, scored: Any, metric: str) -> dict[str, float] | None:
        """Return the scores of trivial predictors of the data set (of labelled data, accuracies); None without any."""
        found = scored.baselines(train) if hasattr(scored, "baselines") else None
        return found and {name: s[metric] if isinstance(s, dict) else s for name, s in found.items()}

    @classmethod
    def arguments(cls, batch: Any) -> Arguments:
        """Return the model's arguments for a batch."""
        return (batch.inputs,), {} if batch.padding is None else {"padding": batch.padding}

    @classmethod
    def example_inputs(cls, dataset: Any, config: RunConfig) -> Arguments:
        """Return the model's arguments for the first row, image or segment, on which FLOPs are counted."""
        return cls.arguments(next(evaluation_batches(dataset, 1)))

    def facts(self) -> dict[str, float]:
        """Return facts about the batches before training."""
        return {}

    def files(self) -> dict[str, bytes]:
        """Return files that users of the trained model need, by name: the tokenizer of the data, if any."""
        tokenizer = getattr(self.data, "tokenizer", None)
        return {} if tokenizer is None else {TOKENIZER: tokenizer.dump()}

    def results(self) -> Mapping[str, bytes]:
        """Return files about the split scored last, by name; on the main process."""
        return {}

    def _loaded(self, order: Any, step: int, pin_memory: bool = True) -> Iterator[Any]:
        """Yield batches in an order from a step on, pinned for a GPU if asked."""
        order.start = step
        pinned = pin_memory and self.world.device.type == "cuda"
        return training_batches(self.data, order, self.settings.workers, pinned)


def sums_of(loss: Tensor, *parts: Tensor) -> Tensor:
    """Return the sums of a piece in float64, (W,); NaN if its loss is not finite."""
    sums_W = torch.stack([part.detach().double() for part in parts])
    return sums_W if torch.isfinite(loss) else torch.full_like(sums_W, torch.nan)
