"""Training and evaluation of detectors: images with boxes (and masks), losses, and average precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cached_lab.training.config import RunConfig
from cached_lab.training.distributed import World
from cached_lab.training.loader import GroupedOrder, to_device
from cached_lab.training.metrics import untouched
from cached_lab.training.run_files import CATEGORIES
from cached_lab.training.task import Arguments, Task, sums_of
from cached_transformers.files import json_text

from .coco import CocoDetection, DetectionBatch
from .scores import Results, score, to_results


class Detection(Task):
    """Object detection and instance segmentation, without a state between steps.

    The losses are torchvision's means over a piece of a batch; pieces and processes have equal weights.

    Raises:
        ValueError: settings or a model unfit for detection.
    """

    def __init__(
        self, config: RunConfig, model: nn.Module, train: CocoDetection, validation: CocoDetection, world: World
    ) -> None:
        super().__init__(config, model, train, validation, world)
        check(config, model, train)
        check_categories(train.class_names, validation)
        self.losses: tuple[str, ...] = model.losses  # type: ignore[assignment]
        self.width = len(self.losses) + 2
        self.order = GroupedOrder(train.groups, self.settings.batch_size, self.settings.seed, 0, self.share)

    def batches(self, step: int) -> Iterator[DetectionBatch]:
        return self._loaded(self.order, step, pin_memory=False)  # its images come one by one

    def backward(self, runner: Callable[..., Any], batch: DetectionBatch, scaler: torch.amp.GradScaler) -> Tensor:
        device = self.world.device
        images, targets = to_device(batch, device)
        with self.settings.autocast(device):
            losses = runner(images, targets)
        total = torch.stack([losses[name].float() for name in self.losses]).sum()
        scaler.scale(total / self.settings.accumulate).backward()
        count = len(images)
        parts = [part.detach().double() * count for part in (total, *(losses[name] for name in self.losses))]
        return sums_of(total, *parts, total.new_tensor(count))

    def averages(self, total: Tensor) -> dict[str, float]:
        """Return the loss and its parts, averaged over images."""
        *sums, images = total.tolist()
        return {name: value / images for name, value in zip(("loss", *self.losses), sums, strict=True)}

    def evaluate(self, model: nn.Module, dataset: CocoDetection) -> tuple[dict[str, float], list[dict[str, float]]]:
        check_categories(self.data.class_names, dataset)
        return evaluate_detector(model, dataset, self.world, self.settings.evaluation_rows), []

    @classmethod
    def arguments(cls, batch: DetectionBatch) -> Arguments:
        return (batch.inputs,), {}

    def files(self) -> dict[str, bytes]:
        pairs = zip(self.data.category_ids, self.data.class_names, strict=True)
        return {CATEGORIES: json_text([{"id": number, "name": name} for number, name in pairs])}


def check(config: RunConfig, model: nn.Module, data: CocoDetection) -> None:
    """Raise ValueError for settings and models unfit for detection."""
    settings, name = config.training, config.model["name"]
    if not hasattr(model, "losses"):
        raise ValueError(
            f"model.name={name!r} learns no boxes of data {data.name!r}; take mask_rcnn, faster_rcnn or retinanet"
        )
    known = ("box_ap", "mask_ap") if model.masks else ("box_ap",)
    if settings.metric not in known:
        raise ValueError(f"training.metric={settings.metric!r} does not suit model {name!r}; take {' or '.join(known)}")
    if model.masks and not data.masks:
        way = "set data.masks=true, or take retinanet"
        raise ValueError(f"model.name={name!r} needs masks of {data.annotations.source}: it gives none; {way}")
    if settings.compile:
        raise ValueError("training.compile=true is not for detectors, whose images have many sizes; leave it false")


def check_categories(known: Sequence[str], dataset: CocoDetection) -> None:
    """Raise ValueError for data with other categories than the training data."""
    if list(known) != dataset.class_names:
        differing = sorted({*known} ^ {*dataset.class_names})[:5]
        raise ValueError(
            f"{dataset.annotations.source} has other categories than the training data, or another order "
            f"({differing}); give both files the same list of categories"
        )


def evaluate_detector(model: nn.Module, dataset: CocoDetection, world: World, batch_size: int) -> dict[str, float]:
    """Return average precisions over the whole data set, of boxes and, if both sides have them, masks.

    Evaluation mode and float32; processes share the images, and the model and random states are restored.

    Raises:
        BadFile: an image cannot be read.
    """
    mine = dataset.image_ids[world.rank :: world.size]
    kinds = ("box", "mask") if model.masks and dataset.masks else ("box",)
    results: Results = {kind: [] for kind in kinds}
    with untouched(model):
        for begin in range(0, len(mine), batch_size):
            numbers = mine[begin : begin + batch_size]
            answers = model([dataset.pixels(number).to(world.device) for number in numbers])
            for number, answer in zip(numbers, answers, strict=True):
                found = to_results(answer, number, dataset.category_ids)
                for kind in kinds:
                    results[kind] += found[kind]
    everyone = world.gather(results)
    merged = {kind: [entry for part in everyone for entry in part[kind]] for kind in kinds}
    return score(dataset.annotations.truth, merged, dataset.image_ids)
