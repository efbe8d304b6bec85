"""Probes by distance: the course, the streams, the stored files, and progress."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from common import refuses
from torch import Tensor

from cached_lab.cli.main import main
from cached_lab.experiments.probes import distances, protocol
from cached_lab.experiments.probes.distances import Course, _rate, ladder, train_by_distance
from cached_lab.experiments.probes.far_trials import FarTrials
from cached_lab.experiments.probes.protocol import Forgetful, ProbeSizes, build_model, score
from cached_lab.experiments.probes.tasks import IGNORED
from cached_lab.experiments.reports.probe_page import held_tokens
from cached_lab.registries import PROBES
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.models import LanguageModel

QUICK = ProbeSizes(width=16, depth=1, heads=2, feed_forward=16, steps=60, check_every=20, batch_size=16, rows=128)
RMT = {"name": "rmt", "length": 2}


def test_a_curriculum_grows_by_half_or_by_its_stages() -> None:
    assert Course(1, 7).stages == [1, 2, 3, 4, 6, 7]
    assert Course(3, 20).stages == [3, 4, 6, 9, 13, 19, 20]
    assert Course(4, 4).stages == [4]
    for wrong, said in (((3, 2), r"distances 3\.\.2"), ((0, 0), r"distances 0\.\.0"), ((1, 3, 95.0), r"solved=95\.0")):
        refuses(said, Course, *wrong)
    paper = Course(1, 50, through=(1, 2, 3, 5, 10, 20, 50))
    assert paper.stages == [1, 2, 3, 5, 10, 20, 50]
    assert Course(**json.loads(json.dumps(dataclasses.asdict(paper)))) == paper
    for stages in ((1, 3, 2, 5), (2, 5), (1, 4), (1, 1, 5)):
        refuses(r"must rise from 1 to 5", Course, 1, 5, through=stages)
    task, model = PROBES.create("latch"), build_model(PROBES.create("latch"), RMT, QUICK)
    easy = train_by_distance(model, task, Course(1, 5, solved=0.01, through=(1, 2, 5)), QUICK)
    assert list(easy.solved_at) == [1, 2, 5]


def test_the_ladder_ends_with_the_text_and_the_rate_falls() -> None:
    assert ladder(16, 16_000) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
    assert ladder(16, 1_200) == [1, 2, 5, 10, 20, 50, 75]
    assert ladder(16, 10) == [1]
    assert ladder(16, 1_000_000)[9:] == [1000, 10_000, 62_500]
    rates = [_rate(step, falls_from=60, settling=40, warm=10) for step in range(100)]
    assert rates[0] == 0.1 and rates[9:61] == [1.0] * 52
    assert all(a > b for a, b in itertools.pairwise(rates[60:])) and rates[-1] < 0.01


def test_training_goes_on_as_distances_are_solved_and_then_lets_the_rate_fall() -> None:
    task, sizes = PROBES.create("latch"), ProbeSizes(steps=400, check_every=20, rows=128)
    torch.manual_seed(0)
    model = build_model(task, RMT, sizes)
    trained = train_by_distance(model, task, Course(1, 3, solved=0.9), sizes)
    assert list(trained.solved_at) == [1, 2, 3] and trained.solved == 3 and trained.accuracy >= 0.9
    assert trained.steps == trained.solved_at[3] + 100  # a quarter of all steps, from there on
    assert min(score(model, task, distance, 256).accuracy for distance in (1, 2, 3)) >= 0.9
    untaught = build_model(task, None, QUICK)
    hopeless = train_by_distance(untaught, task, Course(1, 3), QUICK)
    assert hopeless.solved == 0 and hopeless.steps == 60 and hopeless.accuracy < 0.5


@torch.no_grad()
def right(model: Any, task: Any, state: Any = None, pieces: int = 4) -> Tensor:
    """Slow twin: right answers by row and place of an episode of 4 segments, drawn as a whole."""
    inputs_BN, targets_BN = task.draw(64, 3, torch.Generator().manual_seed(8))
    guesses = []
    for piece_BN in inputs_BN.chunk(pieces, 1):
        outputs, state, *_ = model.eval()(piece_BN, state)
        guesses.append(outputs.argmax(-1))
    asked_BN = targets_BN != IGNORED
    return (torch.cat(guesses, 1) == targets_BN)[asked_BN].view(64, -1)


@pytest.mark.parametrize("name", ["latch", "copy"])
def test_a_stream_is_answered_as_an_episode_is(name: str) -> None:
    task = PROBES.create(name)
    torch.manual_seed(0)
    model, plain = build_model(task, RMT, QUICK), build_model(task, None, QUICK)
    right_BQ = right(model, task)
    assert score(model, task, 3, 64, seed=5) == pytest.approx(
        (right_BQ.float().mean().item(), right_BQ.all(1).float().mean().item())
    )
    whole = right(plain, task, pieces=1).float().mean().item()
    assert score(plain, task, 3, 64, seed=5, whole=True).accuracy == pytest.approx(whole)
    twice = build_model(task, {"name": "read_twice", "slots": 4}, QUICK).eval()
    episode = task.draw(64, 3, torch.Generator().manual_seed(8))
    with torch.no_grad():
        state = SegmentLoop(twice, task.segment, 4, 2).earlier_passes(*episode)
    share = right(twice, task, state).float().mean().item()
    assert score(twice, task, 3, 64, 2, seed=5).accuracy == pytest.approx(share)


def test_the_control_knows_nothing_of_earlier_segments_whatever_a_model_carries() -> None:
    task = PROBES.create("latch")
    control = build_model(task, None, ProbeSizes(short_convolution=3))
    assert isinstance(control, Forgetful) and isinstance(build_model(task, None, ProbeSizes()), LanguageModel)
    first, second = (torch.randint(0, task.vocabulary, (2, task.segment)) for _ in range(2))
    carried = control.model(second, control.model(first).state).outputs
    assert not torch.allclose(carried, control.model(second).outputs)
    torch.testing.assert_close(control(second, control(first).state).outputs, control.model(second).outputs)


COMMAND = "probe rmt --tasks latch --train-distance 1..2 --steps 8"


def test_the_command_keeps_trainings_and_asks_the_rest_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cached_lab.experiments.probes.far_trials.NEAR_A_GUESS", -1.0)
    folder = Path("runs/probe")
    assert main([*COMMAND.split(), "--far", "20"]) == 0
    out = capsys.readouterr().out
    assert (
        "latch: rmt, seed 0" in out
        and "Asked 20 tokens after the cue, rmt is right in" in out
        and "tokens held" not in out
        and "report.html" in out
    )
    content = json.loads((folder / "far.json").read_text())
    results = content["results"]
    assert [(r["memory"], r["arm"]) for r in results] == [("none", "no memory"), ("none", "whole text"), ("rmt", "far")]
    assert list(results[2]["far"]) == ["1", "2", "5"] and results[2]["state_bytes"] > 500
    assert (folder / "report.html").read_text().count("<svg") == 1
    weights = folder / "latch/rmt/far_0.safetensors"
    stamp = weights.stat().st_mtime_ns
    assert main([*COMMAND.split(), "--far", "40"]) == 0
    assert "1 finished trainings kept, 2 to do" in capsys.readouterr().out
    farther = json.loads((folder / "latch/rmt/far_0.json").read_text())
    assert list(farther["far"]) == ["1", "2", "5", "10"] and weights.stat().st_mtime_ns == stamp
    assert farther["far"]["5"] == content["results"][2]["far"]["5"]


def test_more_texts_are_asked_anew_and_the_ceiling_is_trained_once_or_not_at_all(tmp_path: Path) -> None:
    def trials(rows: int, ceiling: bool = True) -> FarTrials:
        how = {"course": Course(1, 1), "far": 8, "rows": rows, "ceiling": ceiling}
        return FarTrials(["rmt"], ["latch"], 1, 2, 4, tmp_path, **how)

    assert [trial.arm for trial in trials(4).all()] == ["no memory", "whole text", "far", "no memory", "far"]
    assert [trial.arm for trial in trials(4, ceiling=False).all()] == ["no memory", "far"] * 2
    first = dict(trials(4).train(trials(4).missing(), jobs=1))
    assert all(texts == 4 for result in first.values() for *_, texts in result["far"].values())
    assert not trials(2).missing() and len(trials(6).missing()) == 5
    assert [result["seconds"] for result in dict(trials(6).train(trials(6).missing(), jobs=1)).values()] == [
        result["seconds"] for result in first.values()
    ], "asked about more texts, not trained anew"
    assert not trials(6).missing()


def test_a_long_text_is_read_by_a_compiled_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, made = torch.compile, []

    def compile_(model: torch.nn.Module, dynamic: bool) -> object:
        made.append(compiled(model, dynamic=dynamic, backend="eager", fullgraph=True))
        return made[-1]

    monkeypatch.setattr("torch.compile", compile_)
    monkeypatch.setattr("cached_lab.experiments.probes.far_trials.LONG", 5)
    answers = []
    for read in (False, True):
        how = {"course": Course(1, 1), "far": 40, "compiled": read, "ceiling": False, "rows": 32}
        trials = FarTrials(["rmt"], ["latch"], 1, 1, 4, tmp_path / str(read), **how)
        monkeypatch.setattr("cached_lab.experiments.probes.far_trials.NEAR_A_GUESS", -1.0)
        results = dict(trials.train(trials.missing(), jobs=1))
        answers.append([result["far"] for result in results.values()])
    assert answers[0] == answers[1] and list(answers[1][1]) == ["1", "2", "5", "10"]
    assert len(made) == 2, "for 5 and 10 segments; without a memory nearly nothing is read"


def test_only_distances_of_the_task_are_asked(tmp_path: Path) -> None:
    options = {"niah": {"keys": 14}}
    trials = FarTrials(["rmt"], ["recall", "niah"], 4, 1, 8, tmp_path, options, course=Course(3, 4), far=4000)
    asked = {trial.task: trials.distances(trial) for trial in trials.all() if trial.memory == "rmt"}
    assert asked == {"recall": [1, 2, 4, 5], "niah": [4, 5, 10, 20, 50, 100, 200, 250]}


def test_a_training_that_is_cut_off_leaves_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trials(steps: int) -> FarTrials:
        return FarTrials(["rmt"], ["latch"], 1, 1, steps, tmp_path, course=Course(1, 1), far=4)

    list(trials(4).train(trials(4).missing(), jobs=1))
    with monkeypatch.context() as patch:
        patch.setattr("cached_lab.experiments.probes.far_trials.json_text", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            list(trials(6).train(trials(6).missing(), jobs=1))
    assert len(trials(4).missing()) == 1  # the trial whose weights were overwritten


@pytest.mark.parametrize("taps", [1, 3])
def test_segments_in_which_nothing_is_asked_change_no_answer_of_what_reads_each_alone(taps: int) -> None:
    task = PROBES.create("mqar", segment=32)
    torch.manual_seed(0)
    model, read = build_model(task, None, dataclasses.replace(QUICK, short_convolution=taps)), list[int]()
    torch.nn.init.normal_(next(model.parameters()))  # guesses that differ from text to text
    model.register_forward_hook(lambda *_: read.append(1))
    whole = score(model, task, 7, 64)
    assert len(read) == 8 and 0 < whole.accuracy < 1
    assert score(model, task, 7, 64, stateless=True) == whole and len(read) == 9


def test_tokens_are_held_to_the_first_that_are_not_and_asking_ends_there(tmp_path: Path) -> None:
    answers = {"1": [1.0, 1.0], "10": [0.995, 0.99], "2": [1.0, 1.0], "20": [0.98, 0.9], "50": [1.0, 1.0]}
    assert held_tokens({"far": answers}, 16) == 160
    assert held_tokens({"far": {"1": [0.5, 0.5]}}, 16) == 0
    trials = FarTrials(["rmt"], ["latch"], 2, 1, 8, tmp_path, course=Course(1, 2), far=4000)
    results = dict(trials.train(trials.missing(), jobs=1))
    [answers] = [result["far"] for trial, result in results.items() if trial.memory == "rmt"]
    assert list(answers) == ["1", "2", "5"] and trials.missing() == []
    [alone] = [result["far"] for trial, result in results.items() if trial.arm == "no memory"]
    assert list(map(int, alone)) == ladder(4, 4000), "what carries nothing costs nothing to ask"


def test_memory_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    words = "probe rmt rmt.length=1 latch.classes=2 --tasks latch --train-distance ..1 --steps 4 --far 4"
    assert main(words.split()) == 0
    content = json.loads(Path("runs/probe/far.json").read_text())
    assert content["results"][2]["settings"]["course"]["nearest"] == 0 == PROBES.create("latch").shortest
    assert content["results"][2]["settings"]["memory"] == {"name": "rmt", "length": 1}
    assert content["results"][0]["chance"] == 0.5
    for wrong, says in (("rmt.lenght=1", "did you mean 'length'"), ("rmt.length=x", "rmt.length='x'")):
        assert main(["probe", "rmt", wrong]) != 0
        assert says in capsys.readouterr().err
    assert main(["probe", "rmt", "memformer.length=1"]) != 0
    assert "neither among the memories nor among the tasks" in capsys.readouterr().err


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
WATCHED = ["probe", *SMALL.split(), *["--train-distance", "1..2", "--steps", "8", "--far", "20"]]


def test_several_processes_say_and_find_what_one_does(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said, found = [], []
    for jobs in "12":
        assert main([*WATCHED, "--no-ceiling", "--jobs", jobs, "--out", str(tmp_path / jobs)]) == 0
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
    refuses("heads", list, trials.train(trials.missing(), jobs=2))
    assert not list(tmp_path.rglob("*.json"))
