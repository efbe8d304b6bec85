"""What is trained: rows with a label each, streams of text, pairs, or detectors. The trainer knows steps, files and
signals; a task knows its batches, its loss, what it carries from step to step, and its scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.data.pairs import PairBatch
from cached_transformers.training.config import RunConfig
from cached_transformers.training.distributed import World, wrap
from cached_transformers.training.loader import TrainingOrder, evaluation_batches, training_batches
from cached_transformers.training.metrics import averages, evaluate, forward, score_width, sums

from .classification.mixing import Mixing, make_mixing
from .detection.task import Detection
from .language.task import LanguageModelling
from .translation.task import Translation


class Task(Protocol):
    """What the trainer asks of a task.

    Attributes:
        width: how many sums `backward` returns; the last one counts what the others are divided by.
    """

    width: int

    def runner(self) -> tuple[nn.Module, Callable[..., Any]]:
        """The module that averages gradients over the processes, and what is called (the same, or it compiled)."""
        ...

    def batches(self, step: int) -> Iterator[Any]:
        """Endless pieces of batches for this process, from a step on."""
        ...

    def backward(self, runner: Callable[..., Any], batch: Any, scaler: torch.amp.GradScaler) -> Tensor:
        """Forward and backward of one piece; returns its sums, not a number where the loss is not finite."""
        ...

    def finish(self, taken: bool) -> None:
        """The step is over; what it would carry on counts only if it was taken."""
        ...

    def averages(self, total: Tensor) -> dict[str, float]:
        """Scores from added sums."""
        ...

    def evaluate(self, model: nn.Module, dataset: Any) -> tuple[dict[str, float], list[dict[str, float]]]:
        """Scores over a whole split, and its loss by place in the document where there are documents."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """What is carried to the next step, of all processes; all of them must ask."""
        ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take up what `state_dict` gave."""
        ...


def make_task(config: RunConfig, model: nn.Module, train: Any, validation: Any, world: World) -> Task:
    """The task that the data set calls for.

    Raises:
        ValueError: settings that do not suit it.
    """
    kinds: dict[str, Callable[..., Task]] = {
        "classification": Classification,
        "language": LanguageModelling,
        "detection": Detection,
        "translation": Translation,
    }
    return kinds[task_name(train)](config, model, train, validation, world)


def task_name(dataset: Any) -> str:
    """ "classification", or what the data set says."""
    return getattr(dataset, "task", "classification")


def baselines(config: RunConfig, train: Any, scored: Any) -> dict[str, float] | None:
    """Scores, in the metric of the run, of guessers that the data set offers; None where it offers none."""
    if not hasattr(scored, "baselines"):
        return None
    found = scored.baselines(train)
    return found if task_name(train) == "classification" else {k: v[config.training.metric] for k, v in found.items()}


def example_inputs(dataset: Any, config: RunConfig) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the model for the first row or image, or one segment of text: what FLOPs are counted on."""
    if task_name(dataset) == "language":
        tokens = torch.from_numpy(dataset.tokens[: config.training.segment_length].astype("int64"))
        return (tokens[None],), {}
    batch = next(evaluation_batches(dataset, 1))
    if task_name(dataset) == "detection":
        return (batch.inputs,), {}
    return model_arguments(batch)


def model_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with which a model makes logits of a batch."""
    if isinstance(batch, PairBatch):
        return (batch.inputs, batch.decoder_inputs), {"padding": batch.padding}
    return (batch.inputs,), {} if batch.padding is None else {"padding": batch.padding}


class Classification:
    """One label a row; nothing is carried from step to step."""

    def __init__(self, config: RunConfig, model: nn.Module, train: Any, validation: Any, world: World) -> None:
        self.settings, self.model, self.data, self.world = config.training, model, train, world
        if self.settings.metric not in ("accuracy", "loss"):
            raise ValueError(f"training.metric={self.settings.metric!r} is of text; take accuracy or loss")
        self.width = score_width(train.classes)
        share = (world.rank, world.size, self.settings.accumulate, self.settings.repeats)
        self.order = TrainingOrder(len(train), self.settings.batch_size, self.settings.seed, 0, *share)
        self.mixing = make_mixing(self.settings, train.classes, world.size)

    def runner(self) -> tuple[nn.Module, Callable[..., Any]]:
        wrapped = wrap(self.model, self.world)
        return wrapped, torch.compile(wrapped) if self.settings.compile else wrapped

    def batches(self, step: int) -> Iterator[Any]:
        self.order.start = step
        pin_memory = self.world.device.type == "cuda"
        batches = training_batches(self.data, self.order, self.settings.workers, pin_memory)
        return batches if self.mixing is None else self._mixed(batches, self.mixing, step)

    def _mixed(self, batches: Iterator[Any], mixing: Mixing, step: int) -> Iterator[Any]:
        pieces = self.settings.accumulate
        for number, batch in enumerate(batches):
            yield mixing(batch, self.world.device, step + number // pieces)

    def backward(self, runner: Callable[..., Any], batch: Any, scaler: torch.amp.GradScaler) -> Tensor:
        settings, device = self.settings, self.world.device
        with settings.autocast(device):
            logits_BK, targets, auxiliary = forward(runner, batch, device)
        loss = F.cross_entropy(logits_BK.float(), targets, label_smoothing=settings.label_smoothing)
        if auxiliary is not None:
            loss = loss + auxiliary
        scaler.scale(loss / settings.accumulate).backward()
        if not torch.isfinite(loss):
            return loss.new_full((self.width,), torch.nan).double()
        return sums(logits_BK.detach(), targets)

    def finish(self, taken: bool) -> None:
        pass

    def averages(self, total: Tensor) -> dict[str, float]:
        return averages(total)

    def evaluate(self, model: nn.Module, dataset: Any) -> tuple[dict[str, float], list[dict[str, float]]]:
        size = self.settings.evaluation_batch_size or self.settings.batch_size
        return evaluate(model, dataset, self.world, size, self.settings.workers), []

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        pass
