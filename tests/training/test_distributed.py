"""Two processes learn the same as one process, and write once."""

from __future__ import annotations

import json
from pathlib import Path

import pairs
import pytest
import standin
import torch
import yaml
from refusals import refuses

from cached_lab.cli.main import main
from cached_lab.training.checkpoint import Checkpoints
from cached_lab.training.distributed import in_world, pick_device
from cached_lab.training.metrics import read_metrics


def run(folder: Path, processes: int, *overrides: str) -> str:
    """One process runs here; return what two printed."""
    recipe = folder.parent / "standin.yaml"
    recipe.write_text(yaml.safe_dump(standin.recipe(steps=20, evaluate_every=5, log_every=1)), encoding="utf-8")
    words = ["train", str(recipe), "--out", str(folder), *overrides]
    if processes > 1:
        return "".join(pairs.commands(words, folder.parent / "meeting"))
    assert main(words) == 0
    return ""


@pytest.mark.usefixtures("no_run_reports")
def test_two_processes_follow_the_curve_of_one_and_write_once(tmp_path):
    # 51 validation rows do not divide by two: the metric is exact only if uneven shares are weighed right.
    overrides = ("model.dropout=0.0", "model.rate=0.0", "data.size=51", "training.accumulate=2")
    printed = {n: run(tmp_path / str(n), n, *overrides) for n in (1, 2)}
    curves = [read_metrics(tmp_path / str(n) / "metrics.jsonl") for n in (1, 2)]
    assert len(curves[0]) == len(curves[1]) == 20 + 4
    for left, right in zip(*curves, strict=True):
        assert (left["step"], left["split"]) == (right["step"], right["split"])
        assert left["loss"] == pytest.approx(right["loss"], abs=1e-5)
        assert left["accuracy"] == pytest.approx(right["accuracy"], abs=1e-9)
    assert printed[2].count("validation") == 4
    weights = [Checkpoints(tmp_path / str(n) / "checkpoints").newest_valid()[0].weights for n in (1, 2)]
    for name in weights[0]:
        torch.testing.assert_close(weights[0][name], weights[1][name], rtol=0, atol=1e-5)
    summaries = [json.loads((tmp_path / str(n) / "summary.json").read_text(encoding="utf-8")) for n in (1, 2)]
    assert summaries[0]["test"]["loss"] == pytest.approx(summaries[1]["test"]["loss"], abs=1e-5)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK=5, LOCAL_RANK=0, WORLD_SIZE=2"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "2"}, "LOCAL_RANK=2"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK=one"),
        ({"RANK": "0", "WORLD_SIZE": "-2"}, "WORLD_SIZE=-2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "MASTER_ADDR must"),
    ],
)
def test_an_environment_that_does_not_fit_is_refused_by_name(monkeypatch, given, named):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    refuses(named, in_world, "cpu", lambda world: pytest.fail("the processes met"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what a machine without CUDA lacks")
def test_a_missing_device_is_refused():
    refuses(r"training\.device=cpu", pick_device, "cuda")
