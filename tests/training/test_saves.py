"""Saves in the background: the same files, one at a time, and no error of theirs is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from same_run import assert_same_run
from small_language import STEPS, fitted, make, write_text

from cached_lab.training import checkpoint
from cached_lab.training.checkpoint import WEIGHTS, Checkpoints
from cached_lab.training.interruption import RunFailed
from cached_transformers.files import NotWritten

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
    with pytest.raises(NotWritten, match=rf"step_{bad:08d} could not be written .*earlier checkpoints are untouched"):
        trainer.fit()
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
