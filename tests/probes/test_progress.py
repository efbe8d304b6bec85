"""Progress messages of a probe, on a terminal, in a pipe, and from several processes."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from cached_lab.cli.main import main
from cached_lab.experiments.probes.distances import Course, train_by_distance
from cached_lab.experiments.probes.far_trials import FarTrials
from cached_lab.experiments.probes.protocol import Check, DistanceAnswer, News, ProbeSizes, build_model, probe, score
from cached_lab.experiments.probes.trials import Trial
from cached_lab.experiments.reports.probe_progress import ProbeProgress
from cached_lab.registries import PROBES

RMT = {"name": "rmt", "length": 2}
SIZES = ProbeSizes(width=16, depth=1, heads=2, feed_forward=16, steps=60, check_every=20, batch_size=16, rows=128)
TRIAL = Trial("latch", "rmt", "far", 0)


def test_a_training_by_distance_tells_what_it_returns() -> None:
    task, course, told = PROBES.create("latch"), Course(1, 3, solved=0.2), list[News]()
    torch.manual_seed(0)
    model = build_model(task, RMT, SIZES)
    trained = train_by_distance(model, task, course, SIZES, tell=told.append)
    checks = [news for news in told if isinstance(news, Check)]
    assert len(checks) == len(told) == 3 and [check.step for check in checks] == [20, 40, 60]
    assert {check.distance: check.step for check in checks if check.solved} == trained.solved_at and trained.solved > 1
    assert checks[-1].accuracy == trained.accuracy == score(model, task, checks[-1].distance, SIZES.rows).accuracy
    assert {check.farthest for check in checks} == {3} and checks[-1].steps == trained.steps
    assert all(0.5 < check.loss < 4 for check in checks) and len({check.loss for check in checks}) == 3


def test_a_training_at_one_distance_tells_what_it_returns() -> None:
    told = list[News]()
    outcome = probe(PROBES.create("latch"), RMT, 2, sizes=SIZES, tell=told.append)
    assert [news.step for news in told if isinstance(news, Check)] == [20, 40, 60]
    assert isinstance(told[-1], Check) and told[-1].accuracy == outcome.accuracy
    assert [news.solved for news in told if isinstance(news, Check)] == [False, False, outcome.accuracy >= SIZES.enough]


def check(step: int, distance: int = 1, solved: bool = False) -> Check:
    return Check(step, 100, 0.5, distance, 4, 0.25, solved)


def test_lines_come_by_tenths_and_when_a_distance_is_solved() -> None:
    written = StringIO()
    progress = ProbeProgress(Console(file=written, width=200))
    for step in range(1, 101):
        progress.hear(TRIAL, check(step, 1 + step // 50, solved=step in (13, 50)))
    progress.hear(TRIAL, DistanceAnswer(10_000, 1.0))
    progress.finished(TRIAL, {"accuracy": 0.5, "steps": 100, "seconds": 3.0})
    text = written.getvalue()
    steps = [int(step) for step in re.findall(r"step +(\d+)/100", text)]
    assert steps == [10, 13, 23, 33, 43, 50, 60, 70, 80, 90, 100]
    assert "step    13/100  loss 0.5000  25.0 % right at 1 of 4 segments, solved" in text
    assert text.index("latch: rmt, seed 0: 100.0 % right, 10,000 tokens after the cue") < text.index(
        "latch: rmt, seed 0: 50.0 % right after 100 steps, 3 s"
    )


SMALL = "rmt rmt.length=2 model.width=8 model.depth=1 model.heads=1 model.check_every=4 --tasks latch"
COMMAND = ["probe", *SMALL.split(), *["--train-distance", "1..2", "--steps", "8", "--far", "20"]]


def said(text: str) -> dict[str, list[str]]:
    """Lines by the training that they are of, without its seconds."""
    lines: dict[str, list[str]] = {}
    for line in text.splitlines():
        if found := re.match(r"(latch: .*?, seed 0): (.*?)(, \d+ s)?$", line):
            lines.setdefault(found[1], []).append(found[2])
    return lines


def test_several_processes_say_what_one_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--out", str(tmp_path / "one")]) == 0
    alone = said(capsys.readouterr().out)
    assert main([*COMMAND, "--jobs", "2", "--out", str(tmp_path / "two")]) == 0
    together = said(capsys.readouterr().out)
    assert alone == together
    assert list(alone) == [f"latch: {name}, seed 0" for name in ("no memory", "whole text", "rmt")]
    for name, lines in alone.items():
        kinds = ["step" if line.startswith("step") else "cue" if "cue" in line else "end" for line in lines]
        answers = 2 if "whole" in name else 3
        assert kinds[0] == "step" and kinds[-1 - answers :] == ["cue"] * answers + ["end"], lines


@pytest.mark.slow
def test_a_failure_in_a_process_ends_the_others_and_is_told(tmp_path: Path) -> None:
    trials = FarTrials(["rmt"], ["latch"], 1, 1, 4, tmp_path, {"model": {"heads": 3}}, course=Course(1, 1), far=4)
    with pytest.raises(ValueError, match="heads"):
        list(trials.train(trials.missing(), jobs=2))
    assert not list(tmp_path.rglob("*.json"))
