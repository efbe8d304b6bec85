"""Two processes learn the same as one process, and write once; and end together, by torchrun too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import launch
import pairs
import pytest
import standin
import torch
import yaml
from common import refuses
from drills import _runs, elastic
from drills.frame import Failure
from same_run import final
from small_language import recipe, write_text

from cached_lab.cli.main import main
from cached_lab.training.checkpoint import Checkpoints
from cached_lab.training.distributed import agreed_name, in_world, pick_device
from cached_lab.training.interruption import RunFailed
from cached_lab.training.metrics import read_metrics
from cached_transformers.files import lives


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


@pytest.mark.slow
def test_processes_end_when_torchrun_is_killed_and_their_run_goes_on(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    tree = recipe(tmp_path / "text", "training.parallel=fsdp", "training.steps=100000", "training.save_every=50000")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    run = tmp_path / "run"
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words += ["-m", "cached_lab.cli.main", "train", str(tmp_path / "recipe.yaml"), "--out", str(run)]
    words += ["training.evaluate_every=50000"]
    environment = {**os.environ, "PYTHONPATH": str(launch.SOURCE), "OMP_NUM_THREADS": "1"}
    torchrun = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while len(read_metrics(run / "metrics.jsonl")) < 3 and time.monotonic() < until:
        time.sleep(0.05)
    owner = json.loads((run / ".lock").read_text(encoding="utf-8"))["process"]
    torchrun.send_signal(signal.SIGKILL)
    torchrun.wait()
    while lives(owner) and time.monotonic() < until:
        time.sleep(0.05)
    assert not lives(owner) and final(run).step >= 9
    assert not (run / ".lock").exists()


def test_a_name_is_agreed_on_whatever_earlier_processes_have_said() -> None:
    store = torch.distributed.HashStore()
    former: set[str] = set()
    for _ in range(3):
        found: list[str] = []
        threads = [
            threading.Thread(target=lambda rank=rank, found=found: found.append(agreed_name(store, rank, 3, 20.0)))
            for rank in (2, 0, 1)
        ]
        for thread in threads:
            thread.start()
            time.sleep(0.05)  # the first process then finds values of earlier processes
        for thread in threads:
            thread.join()
        assert len(found) == 3 and len(set(found)) == 1 and not former & set(found)
        former |= set(found)


@pytest.mark.parametrize(("rank", "missing"), [(0, 1), (1, 0)])
def test_a_process_that_does_not_come_is_named(rank: int, missing: int) -> None:
    with pytest.raises(RunFailed, match=rf"process {rank} of 2 waited 0 s for process {missing}"):
        agreed_name(torch.distributed.HashStore(), rank, 2, 0.02)


def test_the_drill_draws_reachable_moments_and_sees_a_bit() -> None:
    kills = elastic.draw(200, 100, 5, seed=0)
    assert [kill.step for kill in kills] == sorted(kill.step for kill in kills) and kills[-1].step <= 90
    assert {kill.kind for kill in kills} == set(elastic.KINDS) and {kill.rank for kill in kills} == {0, 1}
    assert kills == elastic.draw(200, 100, 5, seed=0) != elastic.draw(200, 100, 5, seed=1)
    tree = {"w": torch.tensor([0.0, 1.0]), "seconds": 1.0, "n": [1, (2, "x")]}
    _runs._same_tree("t", tree, {**tree, "w": tree["w"].clone(), "seconds": 2.0})
    for other in ({**tree, "w": torch.tensor([-0.0, 1.0])}, {**tree, "n": [1, (2, "y")]}, {"w": tree["w"]}):
        refuses("t", _runs._same_tree, "t", tree, other, raises=Failure)
