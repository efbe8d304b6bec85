"""The mean of the newest checkpoints' weights, as translation papers report it (fairseq's average_checkpoints).

Shared caches are no weights: gates and cache of one step fit each other. By default they are copied from the newest
checkpoint; `caches="average"` takes their mean too, which is what fairseq's script does to every tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from .checkpoint import Checkpoint, Checkpoints, read_checkpoint

CACHES = ("copy", "average")


def average_checkpoints(model: nn.Module, paths: Sequence[Path], caches: str = "copy") -> tuple[dict[str, Tensor], int]:
    """Averaged weights of some step folders, and the step of the newest.

    Args:
        model: which says what is a parameter and what a buffer. paths: oldest first.
        caches: "copy" takes buffers of the newest, "average" the mean of those that hold floating-point numbers.

    Raises:
        ValueError: no paths, an unknown choice, a damaged checkpoint, or one of another model.
    """
    if caches not in CACHES:
        raise ValueError(f"average_caches={caches!r} must be {' or '.join(CACHES)}")
    if not paths:
        raise ValueError("there is no checkpoint to average")
    buffers = {name for name, _ in model.named_buffers()}
    total: dict[str, Tensor] = {}
    newest: Checkpoint | None = None
    for path in paths:
        newest = read_checkpoint(path)
        if total and newest.weights.keys() != total.keys():
            raise ValueError(f"{path} is of another model than {paths[0]}; average checkpoints of one run")
        for name, tensor in newest.weights.items():
            wide = tensor.double() if tensor.is_floating_point() else tensor
            total[name] = wide if name not in total or not wide.is_floating_point() else total[name] + wide
    assert newest is not None
    weights: dict[str, Tensor] = {}
    for name, tensor in newest.weights.items():
        kept = not tensor.is_floating_point() or (caches == "copy" and name in buffers)
        weights[name] = tensor if kept else (total[name] / len(paths)).to(tensor.dtype)
    return weights, newest.step


def newest_checkpoints(folder: Path, count: int) -> list[Path]:
    """The newest step folders of a run, oldest first (ValueError: there are fewer)."""
    if count < 1:
        raise ValueError(f"average={count} must be at least 1 checkpoint")
    paths = Checkpoints(folder / "checkpoints").paths()
    if len(paths) < count:
        raise ValueError(
            f"{folder} has {len(paths)} checkpoints, so {count} cannot be averaged; train with "
            f"training.keep={count} or more"
        )
    return paths[-count:]


def checkpoints_made(steps: int, every: int) -> int:
    """How many checkpoints a run of so many steps writes at least."""
    return -(-steps // every)


@torch.no_grad()
def load_average(model: nn.Module, folder: Path, count: int, caches: str = "copy") -> int:
    """Put the average of a run's newest checkpoints into a model; returns the step of the newest.

    Raises:
        ValueError: see `newest_checkpoints` and `average_checkpoints`.
    """
    weights, step = average_checkpoints(model, newest_checkpoints(folder, count), caches)
    model.load_state_dict(weights)
    return step
