"""Restarts: processes that are killed and restarted learn the same as processes without kills."""

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
import pytest
import torch
import yaml
from drills import _runs, elastic
from drills.frame import Failure
from same_run import final
from small_language import recipe, write_text

from cached_lab.training.distributed import agreed_name
from cached_lab.training.interruption import RunFailed
from cached_lab.training.metrics import read_metrics
from cached_transformers.files import lives


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


def test_the_drill_draws_moments_that_each_start_reaches() -> None:
    kills = elastic.draw(200, 100, 5, seed=0)
    assert [kill.step for kill in kills] == sorted(kill.step for kill in kills) and kills[-1].step <= 90
    assert {kill.kind for kill in kills} == set(elastic.KINDS) and {kill.rank for kill in kills} == {0, 1}
    assert kills == elastic.draw(200, 100, 5, seed=0) != elastic.draw(200, 100, 5, seed=1)


def test_the_drill_sees_a_bit() -> None:
    tree = {"w": torch.tensor([0.0, 1.0]), "seconds": 1.0, "n": [1, (2, "x")]}
    _runs._same_tree("t", tree, {**tree, "w": tree["w"].clone(), "seconds": 2.0})
    for other in ({**tree, "w": torch.tensor([-0.0, 1.0])}, {**tree, "n": [1, (2, "y")]}, {"w": tree["w"]}):
        with pytest.raises(Failure, match="t"):
            _runs._same_tree("t", tree, other)
