"""Which task a data set calls for: rows or documents with a label, streams of text, pairs, or images with objects."""

from __future__ import annotations

from typing import Any

from torch import nn

from cached_lab.data.pairs import PairBatch
from cached_lab.training.config import RunConfig
from cached_lab.training.distributed import World
from cached_lab.training.task import Arguments, Task

from .classification.task import Classification
from .detection.task import Detection
from .documents.task import DocumentClassification
from .language.task import LanguageModelling
from .translation.task import TranslationTask

TASKS: dict[str, type[Task]] = {
    "classification": Classification,
    "documents": DocumentClassification,
    "language": LanguageModelling,
    "detection": Detection,
    "translation": TranslationTask,
}
"""Tasks by what a data set calls its `task`."""


def task_name(dataset: Any) -> str:
    """What the data set says it is for; one that says nothing has a label for each row."""
    return getattr(dataset, "task", "classification")


def task_of(dataset: Any) -> type[Task]:
    """The task that the data set calls for."""
    return TASKS[task_name(dataset)]


def make_task(config: RunConfig, model: nn.Module, train: Any, validation: Any, world: World) -> Task:
    """The task that the data set calls for, with a model to train (ValueError: settings that do not suit it)."""
    if config.training.reset_rows and task_name(train) != "language":
        raise ValueError(
            f"training.reset_rows={config.training.reset_rows} empties the memories of streams of text, which data "
            f"{train.name!r} are not; leave it at 0"
        )
    return task_of(train)(config, model, train, validation, world)


def baselines(config: RunConfig, train: Any, scored: Any) -> dict[str, float] | None:
    """Scores, in the metric of the run, of guessers that the data set offers; None where it offers none."""
    return task_of(train).baselines(train, scored, config.training.metric)


def example_inputs(dataset: Any, config: RunConfig) -> Arguments:
    """Arguments of the model for the first row or image, or one segment of text: what FLOPs are counted on."""
    return task_of(dataset).example_inputs(dataset, config)


def model_arguments(batch: Any) -> Arguments:
    """Arguments with which a model makes logits of a batch of rows or pairs."""
    return (TranslationTask if isinstance(batch, PairBatch) else Classification).arguments(batch)
