"""Loss and accuracy of classifiers: sums of a batch, and scores of a whole split.

Legend: B rows, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_lab.training.distributed import World
from cached_lab.training.loader import evaluation_batches, to_device
from cached_lab.training.metrics import untouched


def forward(model: Callable[..., Any], batch: Any, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """Logits (B, K), targets (B) and the auxiliary loss (or None) of one batch, on `device`.

    A model returns a `ModelOutput` or, as third-party models do, logits.
    """
    inputs, targets_B, padding = to_device((batch.inputs, batch.targets, batch.padding), device)
    output = model(inputs, **({} if padding is None else {"padding": padding}))
    if isinstance(output, Tensor):
        return output, targets_B, None
    return output.outputs, targets_B, output.auxiliary_loss


def score_width(classes: int) -> int:
    """Number of sums of `sums`; with ten classes or fewer there is no top-5 accuracy."""
    return 4 if classes > 10 else 3


def sums(logits_BK: Tensor, targets: Tensor, classes: int) -> Tensor:
    """[sum of cross entropies in nats, correct rows, rows], float64; with more than ten classes, rows with the target
    among the five largest logits precede the rows.

    `targets` are classes (B), or shares of classes (B, K), whose largest counts as correct. `classes` are those of the
    data; a model may have more.
    """
    loss = F.cross_entropy(logits_BK.float(), targets, reduction="sum").detach()
    target_B = targets if targets.dim() == 1 else targets.argmax(-1)
    right = [(logits_BK.argmax(-1) == target_B).sum()]
    if score_width(classes) == 4:
        right.append((logits_BK.topk(5).indices == target_B[:, None]).any(-1).sum())
    return torch.stack([part.double() for part in (loss, *right, loss.new_tensor(len(target_B)))])


def averages(total: Tensor) -> dict[str, float]:
    """{loss, accuracy} (and top5_accuracy) from added `sums`."""
    loss, correct, *top5, rows = total.tolist()
    found = {"loss": loss / rows, "accuracy": correct / rows}
    return found | {"top5_accuracy": top5[0] / rows} if top5 else found


def evaluate(
    model: nn.Module,
    dataset: Any,
    world: World,
    batch_size: int,
    workers: int = 0,
    inside: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, float]:
    """Mean loss (nats) and accuracy (0..1) over the whole dataset, in evaluation mode and float32, and the rows scored.

    Processes share the rows; sums are exact for uneven shares. The model and the random states are left unchanged.

    Args:
        workers: processes that load data.
        inside: called with the model in evaluation mode; returns a context for the forwards.

    Raises:
        ValueError: no row could be used.
    """
    total = torch.zeros(score_width(dataset.classes), dtype=torch.float64, device=world.device)
    pin_memory = world.device.type == "cuda"
    with untouched(model), inside(model):
        for batch in evaluation_batches(dataset, batch_size, world.rank, world.size, workers, pin_memory):
            logits_BK, targets_B, _ = forward(model, batch, world.device)
            total = total + sums(logits_BK, targets_B, dataset.classes)
    total = world.sum(total)
    if not total[-1]:
        raise ValueError(f"no row of the {getattr(dataset, 'split', '')} split could be used; fetch the data again")
    return {**averages(total), "rows": int(total[-1])}
