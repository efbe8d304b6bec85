"""Checkpoints: atomic, verified on reading, with messages that name the damage; background saves."""

from __future__ import annotations

import errno
import random
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common import refuses
from same_run import assert_same_run
from small_language import STEPS, fitted, make, write_text

from cached_lab.training import checkpoint
from cached_lab.training import checkpoint as module
from cached_lab.training.checkpoint import WEIGHTS, Checkpoints, capture_rng, read_checkpoint, restore_rng
from cached_lab.training.interruption import RunFailed
from cached_transformers.files import NotWritten

CONFIG = {"training": {"steps": 9}}


def save(checkpoints: Checkpoints, step: int, best: int | None = None):
    weights = {"w": torch.full((3, 2), float(step)), "cache": torch.arange(4.0)}
    training = {"numbers": [step, 0.5], "t": torch.ones(2)}
    return checkpoints.save(step, CONFIG, weights, training, None if best is None else {"step": best})


def test_tied_weights_are_saved(tmp_path):
    shared = torch.ones(2, 2)
    path = Checkpoints(tmp_path).save(1, CONFIG, {"a": shared, "b": shared.t()}, {}, None)
    assert set(read_checkpoint(path).weights) == {"a", "b"}


def test_the_newest_and_the_best_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3, 4, 5):
        save(checkpoints, step, best=min(step, 2))
    assert [p.name for p in checkpoints.paths()] == ["step_00000002", "step_00000004", "step_00000005"]
    assert checkpoints.named("last").name == "step_00000005"
    assert checkpoints.named("best").name == "step_00000002"


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("model.safetensors", lambda content: content[:-5], r"is damaged: model\.safetensors does not match"),
        ("training.pt", lambda content: content[:40] + b"?" + content[41:], r"is damaged: training\.pt does not match"),
        ("training.pt", None, r"is damaged: training\.pt is missing"),
        ("meta.json", lambda content: b"{}", r"is not a checkpoint: meta\.json"),
        ("meta.json", lambda content: content.replace(b'"format": 4', b'"format": 99'), r"has checkpoint format=99"),
    ],
)
def test_a_bad_checkpoint_is_refused_and_the_one_before_taken(tmp_path, name, damage, message):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    file = save(checkpoints, 2) / name
    content = file.read_bytes()
    file.unlink()
    if damage is not None:
        file.write_bytes(damage(content))
    refuses(rf"step_00000002 {message}", read_checkpoint, tmp_path / "step_00000002")
    found, problems = checkpoints.newest_valid()
    assert found is not None and found.step == 1
    assert len(problems) == 1 and "step_00000002" in problems[0]
    (tmp_path / "step_00000001" / "training.pt").unlink()
    refuses(r"no checkpoint in .* can be read", checkpoints.newest_valid)


def test_what_is_saved_is_read_back_and_nothing_is_no_error(tmp_path):
    assert Checkpoints(tmp_path / "none").newest_valid() == (None, [])
    refuses("there is no such folder", read_checkpoint, tmp_path / "none")
    path = save(Checkpoints(tmp_path / "checkpoints"), 7)
    stored = read_checkpoint(path)
    assert (stored.step, stored.config) == (7, CONFIG)
    assert torch.equal(stored.weights["w"], torch.full((3, 2), 7.0))
    assert stored.training["numbers"] == [7, 0.5]


@pytest.mark.parametrize("failing", ["model.safetensors", "training.pt", "meta.json"])
def test_a_full_disk_leaves_earlier_checkpoints_and_no_debris(tmp_path, monkeypatch, failing):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1, best=1)
    original = module.write_durably

    def full(path, content):
        if path.name == failing:
            path.write_bytes(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        original(path, content)

    monkeypatch.setattr(module, "write_durably", full)
    with pytest.raises(OSError, match="step_00000002") as error:
        save(checkpoints, 2, best=2)
    assert error.value.errno == errno.ENOSPC
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "last", "step_00000001"]
    assert read_checkpoint(checkpoints.named("best")).step == 1


def test_going_back_sets_later_checkpoints_aside(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=9)
    for step in (1, 2, 3):
        save(checkpoints, step, best=step)
    checkpoints.set_aside_after(1)
    checkpoints.tidy(best=1)
    assert [p.name for p in checkpoints.paths()] == ["step_00000001"]
    assert checkpoints.named("best").name == checkpoints.named("last").name == "step_00000001"
    assert sorted(p.name for p in tmp_path.glob("superseded*")) == [f"superseded_step_0000000{n}_0" for n in (2, 3)]


def test_random_states_come_back_through_a_file(tmp_path):
    random.gauss(0, 1), np.random.randn(), torch.randn(3)
    path = Checkpoints(tmp_path).save(1, CONFIG, {"w": torch.ones(1)}, {"rng": capture_rng()}, None)
    expected = (random.gauss(0, 1), random.random(), np.random.randn(), torch.randn(2).tolist())
    restore_rng(read_checkpoint(path).training["rng"])
    assert (random.gauss(0, 1), random.random(), np.random.randn(), torch.randn(2).tolist()) == expected


def test_the_best_is_what_the_newest_step_folder_says_whatever_the_text_files_say(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (1, 2, 3):
        save(checkpoints, step, best=min(step, 2))
    for name in ("best", "last"):
        (tmp_path / name).write_text("step_00000001\n", encoding="utf-8")
    assert checkpoints.named("best").name == "step_00000002"
    assert checkpoints.named("last").name == "step_00000003"
    checkpoints.tidy(best=2)
    assert (tmp_path / "best").read_text(encoding="utf-8") == "step_00000002\n"
    assert (tmp_path / "last").read_text(encoding="utf-8") == "step_00000003\n"
    shutil.rmtree(tmp_path / "step_00000002")
    refuses("step_00000002 has vanished", checkpoints.named, "best")


def test_what_a_user_puts_beside_checkpoints_stays(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    mine = ["step_00000001_mine", "step_1", "step_00000002.bak", "steps", ".hidden"]
    for name in mine:
        (tmp_path / name).mkdir()
        (tmp_path / name / "note").touch()
    for step in (1, 2, 3):
        save(checkpoints, step, best=step)
    assert [p.name for p in checkpoints.paths()] == ["step_00000003"]
    assert all((tmp_path / name / "note").is_file() for name in mine)


def test_every_flipped_bit_of_meta_json_is_found(tmp_path):
    path = save(Checkpoints(tmp_path), 7, best=7)
    content = (path / "meta.json").read_bytes()
    for place in range(len(content)):
        wrong = bytearray(content)
        wrong[place] ^= 1 << place % 8
        (path / "meta.json").write_bytes(wrong)
        refuses(r"step_00000007 (is damaged|is not a checkpoint|has checkpoint format)", read_checkpoint, path)
    (path / "meta.json").write_bytes(content)
    assert read_checkpoint(path).step == 7


def test_saving_a_step_again_loses_nothing_at_any_moment(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 3, best=3)
    original = Path.rename

    def died(path, target):
        if path.name == ".partial":
            raise KeyboardInterrupt
        return original(path, target)

    monkeypatch.setattr(Path, "rename", died)
    with pytest.raises(KeyboardInterrupt):
        save(checkpoints, 3, best=3)
    monkeypatch.undo()
    assert read_checkpoint(tmp_path / "superseded_step_00000003_0").step == 3
    save(checkpoints, 3, best=3)
    assert checkpoints.named("last").name == "step_00000003"


def test_a_surplus_checkpoint_is_never_there_in_part(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1, best=1)

    def died(path, ignore_errors=False):
        if path.name.startswith((".surplus", "step")) and path.exists():
            (path / "training.pt").unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(module.shutil, "rmtree", died)
    with pytest.raises(KeyboardInterrupt):
        save(checkpoints, 2, best=2)
    monkeypatch.undo()
    assert [read_checkpoint(path).step for path in checkpoints.paths()] == [2]
    checkpoints.tidy(best=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "last", "step_00000002"]


def test_a_best_that_vanished_while_training_is_no_bad_input(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    shutil.rmtree(save(checkpoints, 1, best=1))
    with pytest.raises(OSError, match="step_00000001") as error:
        save(checkpoints, 2, best=1)
    assert not isinstance(error.value, FileNotFoundError)  # which the command takes for bad input


ASYNC = ["training.save=async", "training.save_every=2", "training.keep=9"]
ASYNC += ["training.ema_decay=0.9", "training.log_every=2"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("saves") / "text")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def slow_writing(monkeypatch: pytest.MonkeyPatch, writing: Any = lambda: time.sleep(0.02)) -> None:
    """Call something before each file of a checkpoint is written."""
    original = checkpoint.write_durably

    def write(path: Path, content: bytes) -> None:
        writing()
        original(path, content)

    monkeypatch.setattr(checkpoint, "write_durably", write)


def test_the_files_are_those_of_a_run_that_waits(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fitted(tmp_path / "sync", text, *ASYNC, "training.save=sync")
    slow_writing(monkeypatch)
    fitted(tmp_path / "async", text, *ASYNC, "training.steps=8")
    fitted(tmp_path / "async", text, *ASYNC)
    assert_same_run(tmp_path / "async", tmp_path / "sync", STEPS)
    assert names(tmp_path / "async") == names(tmp_path / "sync")
    for path in Checkpoints(tmp_path / "sync" / "checkpoints").paths():
        other = tmp_path / "async" / "checkpoints" / path.name
        assert (path / WEIGHTS).read_bytes() == (other / WEIGHTS).read_bytes()


def test_training_goes_on_and_the_next_save_waits(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path, text, *ASYNC)
    met: list[tuple[int, int]] = []
    original = Checkpoints.save

    def save(self: Checkpoints, step: int, *arguments: Any) -> Path:
        assert threading.current_thread() is not threading.main_thread()
        until = time.monotonic() + 10
        while trainer.step == step < STEPS and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(0.05)
        met.append((step, trainer.step))
        return original(self, step, *arguments)

    monkeypatch.setattr(Checkpoints, "save", save)
    trainer.fit()
    assert [step for step, _ in met] == list(range(2, STEPS + 1, 2))
    assert all(step < then <= step + 2 for step, then in met[:-1]) and met[-1] == (STEPS, STEPS)


@pytest.mark.parametrize("last", [False, True])
def test_an_error_reaches_the_next_save(
    last: bool, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(tmp_path, text, *ASYNC)
    bad = STEPS if last else 4

    def full(path: Path, content: bytes) -> Iterator[None]:
        raise OSError(28, "No space left on device")

    original = Checkpoints.save

    def save(self: Checkpoints, step: int, *arguments: Any) -> Path:
        if step == bad:
            monkeypatch.setattr(checkpoint, "write_durably", full)
        return original(self, step, *arguments)

    monkeypatch.setattr(Checkpoints, "save", save)
    refuses(rf"step_{bad:08d} could not be written .*earlier checkpoints are untouched", trainer.fit, raises=NotWritten)
    assert trainer.step == (STEPS if last else 6)
    kept = [path.name for path in Checkpoints(tmp_path / "checkpoints").paths()]
    assert kept == [f"step_{step:08d}" for step in range(2, bad, 2)] and ".partial" not in names(tmp_path)
    trainer.writer.wait()  # it was raised once


def test_where_training_fails_the_last_save_is_on_disk_and_an_error_of_it_is_said(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_writing(monkeypatch, lambda: time.sleep(0.1))
    for number, problem in enumerate((None, OSError(28, "No space left on device"))):
        trainer = make(tmp_path / f"{number}", text, *ASYNC, "training.steps=4")
        said: list[str] = []
        monkeypatch.setattr(trainer.reporter, "message", said.append)
        with pytest.raises(RunFailed, match="made"), trainer.writer.finished(said.append):
            trainer.step = 1
            if problem is not None:
                monkeypatch.setattr(trainer.checkpoints, "_finish", lambda *_: (_ for _ in ()).throw(problem))  # noqa: B023
            trainer.save()
            raise RunFailed("made")
        assert len(trainer.checkpoints.paths()) == (problem is None)
        assert [("could not be written (No space left" in line) for line in said] == ([] if problem is None else [True])
