"""Comparison of two runs, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pairs
import pytest
import torch

from cached_lab.training.checkpoint import Checkpoint, Checkpoints
from cached_lab.training.distributed import World, in_world
from cached_lab.training.metrics import read_metrics
from cached_lab.training.trainer import Trainer


def final(folder: Path) -> Checkpoint:
    """The newest checkpoint of a run; none of them is damaged."""
    checkpoint, problems = Checkpoints(folder / "checkpoints").newest_valid()
    assert checkpoint is not None and problems == []
    return checkpoint


def in_two_processes(function: Callable[..., Any], folder: Path, *arguments: str) -> list[Any]:
    """Call `function(world, folder, *arguments)` in two forked processes; return its results in order of rank."""

    def work(world: World) -> None:
        torch.save(function(world, folder, *arguments), folder / f"{world.rank}.pt")

    def begin() -> None:
        torch.set_num_threads(1)
        in_world("cpu", work)

    assert pairs.statuses(pairs.start(begin, folder / "meeting")) == [0, 0]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def train_until_killed(trainer: Trainer, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train until a number of pieces of batches were read, possibly in the middle of a step."""
    batches = trainer.task.batches

    def ended(step: int) -> Iterator[Any]:
        for number, batch in enumerate(batches(step)):
            if number == pieces:
                raise RuntimeError("killed")
            yield batch

    monkeypatch.setattr(trainer.task, "batches", ended)
    with pytest.raises(RuntimeError, match="killed"):
        trainer.fit()


def assert_same_run(left: Path, right: Path, steps: int) -> None:
    """Weights, buffers, optimiser, carried state, random states and metrics are equal to the bit; times may differ."""
    a, b = final(left), final(right)
    assert a.step == b.step == steps
    assert_same_tree(a.weights, b.weights)
    timeless = [{key: value for key, value in c.training.items() if "seconds" not in key} for c in (a, b)]
    assert_same_tree(*timeless)
    lines = [[{**line, "seconds": 0} for line in read_metrics(folder / "metrics.jsonl")] for folder in (left, right)]
    assert lines[0] == lines[1]


def assert_same_tree(left: object, right: object, name: str = "") -> None:
    """`name` is the place in the tree, for the message."""
    assert type(left) is type(right), name
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right), name  # type: ignore[arg-type]
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), name  # type: ignore[attr-defined]
        for key in left:
            assert_same_tree(left[key], right[key], f"{name}/{key}")  # type: ignore[index]
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), name  # type: ignore[arg-type]
        for index, pair in enumerate(zip(left, right, strict=True)):  # type: ignore[call-overload]
            assert_same_tree(*pair, f"{name}/{index}")
    else:
        assert left == right, name
