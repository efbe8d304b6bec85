"""Hybrid sharding: two copies of a model over four processes learn the same as one process."""

from __future__ import annotations

from pathlib import Path

import launch
import pytest
import torch
from same_run import assert_same_run
from sharded_runs import CARRIED, fitted, make, of_memory
from small_language import write_text
from test_sharding import ALONE, close

from cached_lab.training.checkpoint import SHARDS, Checkpoints
from cached_lab.training.distributed import World
from cached_lab.training.metrics import read_metrics
from cached_lab.training.settings import TrainingConfig
from cached_lab.training.sharding import Shards

HYBRID = ("training.parallel=fsdp", "training.shares=2", "training.batch_size=8")


def train_all(world: World, folder: Path) -> tuple[int, int]:
    """Train in one of four processes; return the local and the total number of parameters."""
    text = folder / "text"
    if world.main:
        write_text(text)
    world.barrier()
    fitted(folder / "rmt", text, world, *of_memory("rmt"), *HYBRID)
    options = (*CARRIED, *HYBRID, "training.save=async")
    fitted(folder / "whole", text, world, *options, "training.steps=6")
    fitted(folder / "parts", text, world, *options, "training.steps=4")
    trainer = fitted(folder / "parts", text, world, *options, "training.steps=6")
    share = sum(p.to_local().numel() for p in trainer.model.parameters())  # type: ignore[operator]
    return share, sum(p.numel() for p in trainer.model.parameters())


@pytest.mark.slow
def test_four_processes_learn_what_one_learns_and_go_on(tmp_path: Path) -> None:
    shares = launch.world(train_all, tmp_path, processes=4)
    fitted(tmp_path / "alone", tmp_path / "text", ALONE, *of_memory("rmt"), HYBRID[-1])
    curves = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("alone", "rmt")]
    assert len(curves[0]) == len(curves[1]) == 4
    for alone, four in zip(*curves, strict=True):
        assert four["loss"] == pytest.approx(alone["loss"], abs=1e-6)
        assert four.get("gradient_norm") == pytest.approx(alone.get("gradient_norm"), abs=1e-6)
    one, two = (Checkpoints(tmp_path / name / "checkpoints").newest_valid()[0] for name in ("alone", "rmt"))
    assert one is not None and two is not None and (two.path / SHARDS).is_dir()
    close(two.weights, one.weights)
    for name, value in two.training["optimizer"]["state"].items():
        close(value, one.training["optimizer"]["state"][name])
    assert_same_run(tmp_path / "whole", tmp_path / "parts", 6)
    assert len(shares) == 4 and all(0.4 * whole < share < 0.6 * whole for share, whole in shares)
    trainer = make(tmp_path / "parts", tmp_path / "text", ALONE, *CARRIED, HYBRID[-1], "training.steps=6")
    trainer.resume("auto")  # one process, which needs no copies
    assert trainer.step == 6


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"training\.shares=2.*training\.parallel=fsdp"):
        TrainingConfig(shares=2)
    with pytest.raises(ValueError, match=r"training\.shares=1.*2,"):
        TrainingConfig(shares=1, parallel="fsdp")
    with pytest.raises(ValueError, match=r"training\.shares=3"):
        Shards(torch.nn.Linear(2, 2), World(torch.device("cpu"), 0, 4), shares=3)
