"""Classification: rows with a label each.

Legend: B rows, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_lab.training.config import RunConfig
from cached_lab.training.distributed import World
from cached_lab.training.loader import TrainingOrder
from cached_lab.training.task import Task, sums_of

from .mixing import make_mixing
from .scores import averages, evaluate, forward, score_width, sums


class Classification(Task):
    """One label per row; no state is carried from step to step."""

    def __init__(self, config: RunConfig, model: nn.Module, train: Any, validation: Any, world: World) -> None:
        super().__init__(config, model, train, validation, world)
        settings = self.settings
        if settings.metric not in ("accuracy", "loss"):
            raise ValueError(f"training.metric={settings.metric!r} does not suit classification; take accuracy or loss")
        if getattr(model, "remembers", False):
            raise ValueError(
                f"model.memory={config.model.get('memory')!r} carries a state from frame to frame, and a row here is "
                "a single image; take a shared memory such as grc, or SegmentLoop with videos"
            )
        self.classes, self.width = train.classes, score_width(train.classes)
        order = (len(train), settings.batch_size, settings.seed, 0, self.share, settings.repeats)
        self.order = TrainingOrder(*order)
        self.mixing = make_mixing(settings, config.model.get("classes", train.classes), world.size)

    def batches(self, step: int) -> Iterator[Any]:
        for number, batch in enumerate(self._loaded(self.order, step)):
            if self.mixing is None:
                yield batch
            else:
                yield self.mixing(batch, self.world.device, step + number // self.settings.accumulate)

    def backward(self, runner: Callable[..., Any], batch: Any, scaler: torch.amp.GradScaler) -> Tensor:
        settings, device = self.settings, self.world.device
        with settings.autocast(device):
            logits_BK, targets, auxiliary = forward(runner, batch, device)
        loss = F.cross_entropy(logits_BK.float(), targets, label_smoothing=settings.label_smoothing)
        if auxiliary is not None:
            loss = loss + auxiliary
        scaler.scale(loss / settings.accumulate).backward()
        return sums_of(loss, *sums(logits_BK.detach(), targets, self.classes))

    def averages(self, total: Tensor) -> dict[str, float]:
        return averages(total)

    def evaluate(self, model: nn.Module, dataset: Any) -> tuple[dict[str, float], list[dict[str, float]]]:
        return evaluate(model, dataset, self.world, self.settings.evaluation_rows, self.settings.workers), []
