"""Processes that work for a command end with it, however it ends, and when one of them fails."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from drills.frame import forked

from cached_lab.experiments import subprocesses
from cached_lab.experiments.subprocesses import start_command, work_off
from cached_lab.training.interruption import RunFailed, Stopped

CHILD = """\
import os, signal, sys, time
from cached_lab.experiments.subprocesses import stop_after
folder = sys.argv[1]
def asked(number, frame):
    open(f"{folder}/asked_{number}", "w").close()
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, asked)
stop_after(lambda: os.read(0, 1))
with open(f"{folder}/pid", "w") as file:
    file.write(f"{os.getpid()} ")
while not os.path.exists(f"{folder}/fail"):
    time.sleep(0.01)
sys.exit(3)
"""
"""A child that works until it is asked to stop, or told to fail."""
ASKED = f"asked_{signal.SIGTERM}"


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    monkeypatch.setattr(subprocesses, "_COMMAND", CHILD)
    found = [tmp_path / name for name in ("a", "b", "c")]
    for folder in found:
        folder.mkdir()
    yield found
    for folder in found:
        (folder / "fail").touch()


def work(folders: list[Path]) -> None:
    """Three children, two at a time."""

    def start(folder: Path):
        path = os.pathsep.join(filter(None, sys.path))
        with (folder / "log").open("w") as log:
            return start_command([str(folder)], log, {**os.environ, "PYTHONPATH": path})

    def ended(folder: Path, status: int) -> None:
        if status:
            raise RunFailed(f"{folder.name} ended with status {status}")

    work_off(folders, 2, start, ended)


def until(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def begun(folders: list[Path]) -> bool:
    return all((folder / "pid").is_file() and (folder / "pid").read_text().endswith(" ") for folder in folders[:2])


def alive(folder: Path) -> bool:
    """True while the child works; a child without a parent may stay a zombie."""
    process = Path("/proc", (folder / "pid").read_text().strip(), "stat")
    return process.is_file() and process.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes where Linux shows them")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_children_end_with_their_parent(folders, number):
    def stopped() -> int:
        try:
            work(folders)
        except Stopped as stop:
            return stop.signal_number if all((folder / ASKED).is_file() for folder in folders[:2]) else 1
        return 0

    parent = forked(stopped)
    until(lambda: begun(folders))
    os.kill(parent, number)
    status = os.waitstatus_to_exitcode(os.waitpid(parent, 0)[1])
    assert status == (-number if number == signal.SIGKILL else number)
    until(lambda: not any(map(alive, folders[:2])))
    assert all((folder / ASKED).is_file() for folder in folders[:2]) and not (folders[2] / "pid").exists()


def test_others_stop_when_one_fails(folders):
    def failed() -> int:
        until(lambda: begun(folders))
        (folders[0] / "fail").touch()
        return 0

    helper = forked(failed)
    with pytest.raises(RunFailed, match="a ended with status 3"):
        work(folders)
    os.waitpid(helper, 0)
    assert (folders[1] / ASKED).is_file() and not (folders[2] / "pid").exists()
