"""Accuracy and loss of documents of any number of segments, in the memory of one.

Legend: B rows, K classes.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from cached_lab.tasks.classification.scores import averages, score_width, sums
from cached_lab.training.distributed import World
from cached_lab.training.loader import evaluation_batches, to_device
from cached_lab.training.metrics import untouched

from .dataset import DocumentDataset
from .loop import DocumentLoop


def evaluate_documents(
    model: nn.Module,
    dataset: DocumentDataset,
    world: World,
    batch_size: int,
    passes: int = 1,
    segments: int | None = None,
    memory: str = "carry",
    seed: int = 0,
) -> dict[str, Any]:
    """Mean loss (nats) and accuracy (0..1) over a whole split, in evaluation mode and float32, and the rows scored.

    Processes share the rows; sums are exact for uneven shares. The model and the random states are left unchanged.

    Args:
        passes: number of readings of a document.
        segments: most segments of a document; None for whole documents.
        memory: "carry", "reset" or "shuffle", see `DocumentLoop`. seed: of the shuffle.

    Raises:
        ValueError: shuffling with a single row.
    """
    most = dataset.segments if segments is None else segments
    generator = torch.Generator().manual_seed(seed)
    loop = DocumentLoop(model, dataset.segment_length, most, passes, memory=memory, generator=generator)
    limited = copy.copy(dataset)
    limited.limit = segments
    total: Tensor | float = 0.0
    with untouched(model):
        for batch in evaluation_batches(limited, batch_size, world.rank, world.size):
            inputs, targets_B, padding = to_device((batch.inputs, batch.targets, batch.padding), world.device)
            total = total + sums(loop(inputs, padding)[0], targets_B, dataset.classes)
    if not isinstance(total, Tensor):  # more processes than documents
        total = torch.zeros(score_width(dataset.classes), dtype=torch.float64, device=world.device)
    total = world.sum(total)
    return {**averages(total), "rows": int(total[-1])}
