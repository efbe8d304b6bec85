"""SIGINT and SIGTERM at every stage of a command: never lost, and the resumed run equals the undisturbed run."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import standin
import yaml
from training.same_run import assert_same_run, assert_same_tree

from cached_lab.cli.main import main
from cached_lab.experiments import run as run_module
from cached_lab.experiments.load import load_run
from cached_lab.training import trainer as trainer_module
from cached_lab.training.checkpoint import Checkpoints
from cached_lab.training.interruption import Stopped, ended_by_signals, stop_requests
from cached_lab.training.progress import Reporter
from cached_lab.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("no_run_reports")
STAGES = {
    "data": (run_module, "build_dataset"),
    "model": (run_module, "build_model"),
    "resume": (Trainer, "resume"),
    "files": (trainer_module, "MetricsFile"),
    "step": (Trainer, "_train_step"),
    "save": (Trainer, "save"),
    "the loop's last look": (Reporter, "__exit__"),
    "test": (run_module, "_test"),
    "summary": (run_module, "_summary"),
    "figures": (run_module, "write_gates"),
}


def words(folder: Path) -> list[str]:
    recipe = folder.parent / "standin.yaml"
    recipe.write_text(yaml.safe_dump(standin.recipe(steps=4, evaluate_every=2)), encoding="utf-8")
    return ["train", str(recipe), "--out", str(folder)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert main(words(folder)) == 0
    return folder


@pytest.mark.parametrize(
    ("stage", "moment"), [*((stage, "before") for stage in STAGES), *((s, "after") for s in ("step", "save", "test"))]
)
def test_a_signal_at_any_stage_ends_the_command(stage, moment, tmp_path, undisturbed, capsys, monkeypatch):
    number = signal.SIGTERM if len(stage) % 2 else signal.SIGINT
    place, name = STAGES[stage]
    original: Callable = getattr(place, name)

    def struck(*arguments: object, **named: object) -> object:
        monkeypatch.setattr(place, name, original)
        if moment == "before":
            signal.raise_signal(number)
        result = original(*arguments, **named)
        if moment == "after":
            signal.raise_signal(number)
        return result

    monkeypatch.setattr(place, name, struck)
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    assert main(words(tmp_path / "run")) == 128 + number
    assert f"stopped by {number.name}" in capsys.readouterr().err
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert main(words(tmp_path / "run")) == 0
    assert_same_run(tmp_path / "run", undisturbed, 4)
    assert (tmp_path / "run" / "summary.json").is_file()


@pytest.mark.parametrize("step", range(1, 6))
@pytest.mark.parametrize("extended", [False, True])
def test_a_checkpoint_off_schedule_is_neither_averaged_nor_kept(extended, step, tmp_path, monkeypatch):
    more = ["training.steps=6", "training.average_last=2", "training.test=last", "schedule.name=constant"]
    more += ["schedule.warmup_steps=0", "training.metric=loss"]
    original, runs = Trainer._train_step, [tmp_path / name for name in ("run", "whole")]

    def struck(trainer, *arguments):
        original(trainer, *arguments)
        if trainer.step == step:
            signal.raise_signal(signal.SIGTERM)

    if extended:
        monkeypatch.setattr(run_module, "check_average", lambda config: None)
        monkeypatch.setattr(run_module, "_test", lambda *arguments: None)
        assert main([*words(runs[0]), *more, f"training.steps={step}"]) == 0
    else:
        monkeypatch.setattr(Trainer, "_train_step", struck)
        assert main([*words(runs[0]), *more]) == 128 + signal.SIGTERM
    monkeypatch.undo()
    assert [main([*words(run), *more]) for run in runs] == [0, 0]
    names = [[path.name for path in Checkpoints(run / "checkpoints").paths()] for run in runs]
    assert names[0] == names[1] and f"step_{6:08d}" in names[0]
    scores = [json.loads((run / "summary.json").read_text(encoding="utf-8"))["test"] for run in runs]
    assert scores[0] == scores[1]
    assert_same_tree(*(load_run(run, "tested")[1].state_dict() for run in runs))


@pytest.mark.parametrize("looks", ["a loop begins", "the command ends", "an error comes of it"])
def test_a_signal_that_something_swallows_counts_all_the_same(looks):
    with pytest.raises(Stopped, match="SIGTERM"), ended_by_signals():
        with contextlib.suppress(BaseException):
            signal.raise_signal(signal.SIGTERM)
        if looks == "a loop begins":
            with stop_requests():
                pytest.fail("the loop began")
        if looks == "an error comes of it":
            raise ImportError("half of a module")


def test_a_request_after_the_last_look_is_passed_on():
    with pytest.raises(Stopped, match="SIGINT"), stop_requests() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop == [signal.SIGINT]
