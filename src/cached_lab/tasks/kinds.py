"""The training task of a data set: classification, documents, language, translation or detection."""

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
"""Tasks by the attribute `task` of a data set."""


def task_name(dataset: Any) -> str:
    """The task of a data set; classification by default."""
    return getattr(dataset, "task", "classification")


def task_of(dataset: Any) -> type[Task]:
    """The class of the task of a data set."""
    return TASKS[task_name(dataset)]


def make_task(config: RunConfig, model: nn.Module, train: Any, validation: Any, world: World) -> Task:
    """The task of a data set, with a model to train (ValueError: settings that do not suit it)."""
    return task_of(train)(config, model, train, validation, world)


def baselines(config: RunConfig, train: Any, scored: Any) -> dict[str, float] | None:
    """Scores of the data set's own guessers, in the metric of the run; None without any."""
    return task_of(train).baselines(train, scored, config.training.metric)


def example_inputs(dataset: Any, config: RunConfig) -> Arguments:
    """Arguments of the model for the first row or image, or one segment of text, to count FLOPs with."""
    return task_of(dataset).example_inputs(dataset, config)


def model_arguments(batch: Any) -> Arguments:
    """Arguments of a model for a batch of rows or pairs."""
    return (TranslationTask if isinstance(batch, PairBatch) else Classification).arguments(batch)
