"""Classification of documents that are read segment by segment with a memory, with a curriculum of lengths.

Legend: B rows, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_lab.data.dataset import Batch
from cached_lab.tasks.classification.scores import averages, score_width, sums
from cached_lab.training.config import RunConfig
from cached_lab.training.distributed import World
from cached_lab.training.loader import TrainingOrder, to_device
from cached_lab.training.settings import make_curriculum
from cached_lab.training.task import Arguments, Scores, Task, sums_of
from cached_transformers.models.sequence_classifier import SequenceClassifier

from .dataset import DocumentDataset
from .loop import DocumentLoop
from .scores import evaluate_documents

STAGE = "curriculum_stage"


class DocumentClassification(Task):
    """One label per document; the gradient crosses all its segments, and no state is carried from step to step.

    With `training.curriculum` a step reads documents of a sampled number of segments. A stage ends by the accuracy on
    validation documents of its largest number of segments.

    Raises:
        ValueError: settings or a model that do not suit documents.
    """

    takes = frozenset({"curriculum", "replay"})

    def __init__(
        self, config: RunConfig, model: nn.Module, train: DocumentDataset, validation: DocumentDataset, world: World
    ) -> None:
        super().__init__(config, model, train, validation, world)
        check(config, model, train)
        self.curriculum = make_curriculum(self.settings)
        self.width = score_width(train.classes)
        settings = self.settings
        self.order = TrainingOrder(len(train), settings.batch_size, settings.seed, 0, self.share)

    def runner(self) -> tuple[nn.Module, Callable[..., Any]]:
        settings = self.settings
        # One graph serves every segment, so the model is compiled instead of the loop.
        model: Any = torch.compile(self.model) if settings.compile else self.model
        loop = DocumentLoop(model, self.data.segment_length, self.data.segments, settings.passes, settings.replay)
        wrapped = self.wrapped(loop)
        return wrapped, wrapped

    def batches(self, step: int) -> Iterator[Batch]:
        mine = self.settings.batch_size // self.world.size
        first, piece = self.world.rank * mine, mine // self.settings.accumulate
        while True:
            rows = self.order.rows(step)
            segments = None if self.curriculum is None else self.curriculum.segments(step)
            items = [self.data.document(row[1], segments, row[0]) for row in rows[first : first + mine]]
            for begin in range(0, mine, piece):
                yield self.data.collate(items[begin : begin + piece])
            step += 1

    def backward(self, runner: Callable[..., Any], batch: Batch, scaler: torch.amp.GradScaler) -> Tensor:
        settings, device = self.settings, self.world.device
        inputs, targets_B, padding = to_device((batch.inputs, batch.targets, batch.padding), device)
        with settings.autocast(device):
            logits_BK, auxiliary = runner(inputs, padding)
        loss = F.cross_entropy(logits_BK.float(), targets_B, label_smoothing=settings.label_smoothing) + auxiliary
        scaler.scale(loss / settings.accumulate).backward()
        return sums_of(loss, *sums(logits_BK.detach(), targets_B, self.data.classes))

    def averages(self, total: Tensor) -> dict[str, float]:
        return averages(total)

    def evaluate(self, model: nn.Module, dataset: DocumentDataset) -> tuple[Scores, list[dict[str, float]]]:
        """Scores of whole documents; for validation also those of the current stage."""
        scores = self._scored(model, dataset, None)
        if self.curriculum is not None and dataset is self.validation:
            longest = self.curriculum.largest()
            whole = longest >= dataset.segments
            accuracy = scores["accuracy"] if whole else self._scored(model, dataset, longest)["accuracy"]
            scores |= {"stage_segments": longest, "stage_accuracy": accuracy}
        return scores, []

    def _scored(self, model: nn.Module, dataset: DocumentDataset, segments: int | None) -> Scores:
        settings = self.settings
        return evaluate_documents(model, dataset, self.world, settings.evaluation_rows, settings.passes, segments)

    def validated(self, scores: Scores) -> None:
        if self.curriculum is not None:
            self.curriculum.scored(scores["stage_accuracy"])

    def state_dict(self) -> dict[str, Tensor]:
        """The stage of the curriculum."""
        return {} if self.curriculum is None else {STAGE: torch.tensor(self.curriculum.stage)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if self.curriculum is not None:
            self.curriculum.stage = int(state[STAGE])

    @classmethod
    def example_inputs(cls, dataset: DocumentDataset, config: RunConfig) -> Arguments:
        """The first segment of the first document, for the cost of a segment."""
        return (dataset[0][0][None, : dataset.segment_length],), {}


def check(config: RunConfig, model: nn.Module, data: DocumentDataset) -> None:
    """Refuse settings and models that do not suit documents (ValueError)."""
    settings = config.training
    if not isinstance(model, SequenceClassifier):
        raise ValueError(
            f"data {data.name!r} are documents with a label, which do not suit model {config.model['name']!r}; take "
            "sequence_classifier"
        )
    if model.max_length < data.segment_length:
        raise ValueError(f"model.max_length={model.max_length} is below data.segment_length={data.segment_length}")
    if settings.metric not in ("accuracy", "loss"):
        raise ValueError(f"training.metric={settings.metric!r} does not suit documents; take accuracy or loss")
    if settings.curriculum is not None and settings.curriculum[-1] > data.segments:
        raise ValueError(
            f"training.curriculum={list(settings.curriculum)} asks for more segments than the {data.segments} of the "
            f"longest document of data {data.name!r}; end it there, or take longer documents (data.segments)"
        )
