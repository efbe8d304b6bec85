"""Progress of a probe in lines, and probes in several processes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from cached_lab.cli.main import main
from cached_lab.experiments.probes import distances, protocol
from cached_lab.experiments.probes.far_trials import FarTrials
from cached_lab.experiments.probes.protocol import ProbeSizes
from cached_lab.registries import PROBES

RMT = {"name": "rmt", "length": 2}
SIZES = ProbeSizes(width=16, depth=1, heads=2, feed_forward=16, steps=60, check_every=20, batch_size=16, rows=128)


def test_a_training_says_each_solved_distance_and_every_tenth_check(monkeypatch: pytest.MonkeyPatch) -> None:
    task, course, said = PROBES.create("latch"), distances.Course(1, 3, solved=0.2), list[str]()
    torch.manual_seed(0)
    trained = distances.train_by_distance(protocol.build_model(task, RMT, SIZES), task, course, SIZES, say=said.append)
    solved = [re.match(r"step +(\d+)/60  loss \d\.\d{4}  .* right at (\d) of 3 .*, solved", line) for line in said]
    assert {int(m[2]): int(m[1]) for m in solved if m} == trained.solved_at and trained.solved > 1
    monkeypatch.setattr(protocol, "LINES", 2)
    said.clear()
    outcome = protocol.probe(task, RMT, 2, sizes=SIZES, say=said.append)
    assert said[0].startswith("step    40/60  loss ") and len(said) == 1 + (outcome.accuracy >= SIZES.enough)


SMALL = "rmt rmt.length=2 model.width=8 model.depth=1 model.heads=1 model.check_every=4 --tasks latch"
COMMAND = ["probe", *SMALL.split(), *["--train-distance", "1..2", "--steps", "8", "--far", "20"]]


def test_several_processes_say_and_find_what_one_does(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said, found = [], []
    for jobs in "12":
        assert main([*COMMAND, "--no-ceiling", "--jobs", jobs, "--out", str(tmp_path / jobs)]) == 0
        lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("latch: ")]
        said.append(sorted(re.sub(r", \d+ s$", "", line) for line in lines))
        content = json.loads((tmp_path / jobs / "far.json").read_text())
        found.append([(r["memory"], r["accuracy"], r["far"]) for r in content["results"]])
    assert said[0] == said[1] and found[0] == found[1] and [memory for memory, *_ in found[0]] == ["none", "rmt"]
    assert "latch: rmt, seed 0: " in said[0][-1] and sum("tokens after the cue" in line for line in said[0]) >= 4


@pytest.mark.slow
def test_a_failure_in_a_process_ends_the_others_and_is_told(tmp_path: Path) -> None:
    course = distances.Course(1, 1)
    trials = FarTrials(["rmt"], ["latch"], 1, 1, 4, tmp_path, {"model": {"heads": 3}}, course=course, far=4)
    with pytest.raises(ValueError, match="heads"):
        list(trials.train(trials.missing(), jobs=2))
    assert not list(tmp_path.rglob("*.json"))
