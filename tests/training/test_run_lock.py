"""One writer per folder: a second start is refused with the owner's name; a killed owner leaves no lock."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pairs
import pytest
import standin
import yaml
from drills.frame import forked

from cached_lab.cli.main import main
from cached_lab.training.distributed import in_world
from cached_lab.training.run_lock import InUse, file_lock, folder_lock, main_holds


@contextmanager
def owner(folder: Path) -> Iterator[int]:
    """Process number of another process that holds a folder until the end of the block."""
    reader, writer = os.pipe()

    def hold() -> None:
        with folder_lock(folder):
            os.write(writer, b"x")
            signal.pause()

    process = forked(hold)
    os.read(reader, 1)
    try:
        yield process
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_second_start_is_refused_by_name_and_changes_nothing(command, tmp_path, capsys):
    recipe, out = tmp_path / "standin.yaml", tmp_path / "out"
    recipe.write_text(yaml.safe_dump(standin.recipe(steps=2)), encoding="utf-8")
    words = [command, str(recipe), "--out", str(out), *(["--with", "plain"] if command == "compare" else [])]
    with owner(out) as process:
        assert main(words) == 1
        message = capsys.readouterr().err
        assert f"{out} is in use by process {process} on " in message and "since 20" in message
        assert "wait for it, stop it, or take another --out" in message
        assert [path.name for path in out.iterdir()] == [".lock"]
    with folder_lock(out):  # the owner was killed: its name is overwritten
        assert json.loads((out / ".lock").read_text(encoding="utf-8"))["process"] == os.getpid()
    assert list(out.iterdir()) == []


def test_two_streams_cannot_keep_one_state(tmp_path, capsys):
    text, state = tmp_path / "text.txt", tmp_path / "state.safetensors"
    text.write_text("words", encoding="utf-8")
    with file_lock(tmp_path / ".state.safetensors.lock", state, "another --state"):
        assert main(["stream", str(tmp_path / "run"), str(text), "--state", str(state)]) == 1
    assert f"{state} is in use by process {os.getpid()}" in (message := capsys.readouterr().err)
    assert "another --state" in message


def test_a_folder_that_was_made_for_nothing_is_removed(tmp_path):
    with pytest.raises(ValueError, match="bad"), folder_lock(tmp_path / "out"):
        raise ValueError("bad")
    assert not (tmp_path / "out").exists()


def test_a_forked_worker_does_not_hold_what_its_parent_holds(tmp_path):
    with folder_lock(tmp_path):
        worker = forked(signal.pause)
    try:
        with folder_lock(tmp_path):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)


def test_processes_that_train_together_are_refused_together(tmp_path):
    def work() -> int:
        try:
            in_world("cpu", lambda world: main_holds(world, tmp_path / "out").__enter__())
        except InUse:
            return 0
        return 1

    with owner(tmp_path / "out"):
        assert pairs.statuses(pairs.start(work, tmp_path / "meeting")) == [0, 0]
