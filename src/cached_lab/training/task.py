"""What the trainer asks of a task. The trainer knows steps, files and signals; a task knows its data and batches, its
loss, what it carries from step to step, its scores, and what of it belongs into the run folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .config import RunConfig
from .distributed import World, wrap
from .loader import Order, Share, evaluation_batches, training_batches
from .sharding import Shards

Scores = dict[str, Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a model."""


class Task:
    """A model, the data that it is trained on, and how it is scored.

    Args:
        config: the resolved configuration.
        model: moved to the device by the trainer.
        train, validation: splits of the data.
        world: the processes that train together.

    Attributes:
        share: what this process takes of a batch.
        shards: what cuts the weights up over processes; None where each process has them all. The trainer sets it.
        width: how many sums `backward` returns; the last one counts what the others are divided by.
        dynamic: of torch.compile: True where the sizes of batches vary.
        of_documents: whether the settings of documents, as a curriculum, mean something here.
        in_pipeline: whether several processes can share the segments of a row.

    Raises:
        ValueError: settings, or a model, that do not suit the data.
    """

    width: int
    dynamic: ClassVar[bool | None] = None
    of_documents: ClassVar[bool] = False
    in_pipeline: ClassVar[bool] = False

    def __init__(self, config: RunConfig, model: nn.Module, train: Any, validation: Any, world: World) -> None:
        self.config, self.settings, self.model, self.world = config, config.training, model, world
        self.data, self.validation = train, validation
        self.shards: Shards | None = None
        for name in ("curriculum", "replay"):
            if getattr(self.settings, name) and not self.of_documents:
                raise ValueError(
                    f"training.{name}={getattr(self.settings, name)} is for documents with a label, not for data "
                    f"{config.data['name']!r}; leave it out"
                )
        pipeline = self.settings.pipeline
        if pipeline > 1 and not self.in_pipeline:
            raise ValueError(
                f"training.pipeline={pipeline} is for text, whose rows are read segment by segment, not for data "
                f"{config.data['name']!r}; leave it out"
            )
        if world.size % pipeline:
            raise ValueError(
                f"training.pipeline={pipeline} needs so many processes, or a multiple of it, and there "
                f"{'is 1' if world.size == 1 else f'are {world.size}'}; start torchrun --nproc-per-node {pipeline}, or "
                "take training.pipeline=1"
            )
        self.share = Share(world.rank // pipeline, world.size // pipeline, self.settings.accumulate)

    def runner(self) -> tuple[nn.Module, Callable[..., Any]]:
        """The module that averages gradients over the processes, and what is called (the same, or it compiled)."""
        wrapped = self.wrapped(self.model)
        return wrapped, torch.compile(wrapped, dynamic=self.dynamic) if self.settings.compile else wrapped

    def wrapped(self, module: nn.Module) -> nn.Module:
        """The model, or a loop round it, with gradients averaged over the processes."""
        if self.shards is not None:
            return self.shards.round(module)
        return wrap(module, self.world, some_unused=self.settings.pipeline > 1)

    def batches(self, step: int) -> Iterator[Any]:
        """Endless pieces of batches for this process, from a step on."""
        raise NotImplementedError("abstract: a task deals out its batches")

    def backward(self, runner: Callable[..., Any], batch: Any, scaler: torch.amp.GradScaler) -> Tensor:
        """Forward and backward of one piece; returns its sums, not a number where the loss is not finite."""
        raise NotImplementedError("abstract: a task has a loss")

    def finish(self, taken: bool) -> None:
        """The step is over; what it would carry on counts only if it was taken."""

    def state_dict(self) -> dict[str, Tensor]:
        """What is carried to the next step, of all processes; all of them must ask."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take up what `state_dict` gave."""

    def validated(self, scores: Scores) -> None:
        """The validation split was scored; what changes by that is saved with the run."""

    def averages(self, total: Tensor) -> Scores:
        """Scores from added sums."""
        raise NotImplementedError("abstract: a task says what its sums amount to")

    def evaluate(self, model: nn.Module, dataset: Any) -> tuple[Scores, list[dict[str, float]]]:
        """Scores over a whole split, and its loss by place in the document where there are documents."""
        raise NotImplementedError("abstract: a task scores a split")

    @classmethod
    def baselines(cls, train: Any, scored: Any, metric: str) -> dict[str, float] | None:
        """Scores, in a metric, of guessers that the data set offers; None where it offers none."""
        if not hasattr(scored, "baselines"):  # which is for a data set to choose
            return None
        return {name: scores[metric] for name, scores in scored.baselines(train).items()}

    @classmethod
    def arguments(cls, batch: Any) -> Arguments:
        """Arguments with which a model makes its outputs of a batch."""
        return (batch.inputs,), {} if batch.padding is None else {"padding": batch.padding}

    @classmethod
    def example_inputs(cls, dataset: Any, config: RunConfig) -> Arguments:
        """Arguments of the model for the first row, image or segment of text: what FLOPs are counted on."""
        return cls.arguments(next(evaluation_batches(dataset, 1)))

    @classmethod
    def images(cls, dataset: Any, count: int) -> Tensor | None:
        """The first images of a data set, (B, C, H, W), for maps of features; None where the task has none."""
        return None

    def facts(self) -> dict[str, float]:
        """What is known of the batches before training."""
        return {}

    def files(self) -> dict[str, bytes]:
        """Files that whoever uses the trained model needs, by name."""
        return {}

    def results(self) -> Mapping[str, bytes]:
        """Files about the split that was scored last, by name; on the main process."""
        return {}

    def check_continued(self, folder: Path) -> None:
        """Refuse data that are not those of the run in this folder (ValueError)."""

    def _loaded(self, order: Order, step: int, pin_memory: bool = True) -> Iterator[Any]:
        """Batches in an order, from a step on; pinned, if asked for, where a GPU copies them."""
        order.start = step
        pinned = pin_memory and self.world.device.type == "cuda"
        return training_batches(self.data, order, self.settings.workers, pinned)


def sums_of(loss: Tensor, *parts: Tensor) -> Tensor:
    """The sums of a piece in float64, (W,); not numbers where its loss is not finite."""
    sums_W = torch.stack([part.detach().double() for part in parts])
    return sums_W if torch.isfinite(loss) else torch.full_like(sums_W, torch.nan)
