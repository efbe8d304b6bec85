"""Stop and resume with real signals: the result equals an uninterrupted run, to the bit; locks of runs.

Interrupted runs are forked; resumed and uninterrupted runs are in this process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pairs
import pytest
import standin
import yaml
from common import TORCH
from drills.frame import forked
from training.same_run import assert_same_run, final

from cached_lab.cli.main import main
from cached_lab.experiments.load import load_run, read_run_config
from cached_lab.training.checkpoint import Checkpoints
from cached_lab.training.distributed import in_world
from cached_lab.training.metrics import read_metrics
from cached_lab.training.run_lock import InUse, file_lock, folder_lock, main_holds

pytestmark = pytest.mark.usefixtures("no_run_reports")
STEPS = 40


def command(folder: Path, *arguments: str) -> list[str]:
    """Return the `cached` command that trains the small model."""
    recipe = folder.parent / "standin.yaml"
    tree = standin.recipe(steps=STEPS, evaluate_every=5, log_every=3)
    recipe.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return ["train", str(recipe), "--out", str(folder), *arguments]


def start(folder: Path, *arguments: str, delay: str) -> int:
    """Start it in a forked process, in a group of its own; what it says is in the file `said` beside the folder."""
    words = command(folder, *arguments)

    def work() -> int:
        os.setsid()
        os.environ["STANDIN_DELAY"] = delay
        with (folder.parent / "said").open("w", buffering=1) as file, redirect_stdout(file), redirect_stderr(file):
            return main(words)

    return forked(work)


def wait_for_metrics(process: int, folder: Path, lines: int) -> None:
    """Wait until the run has written a number of lines; fail if it ends before."""
    while len(read_metrics(folder / "metrics.jsonl")) < lines:
        if os.waitpid(process, os.WNOHANG)[0]:
            pytest.fail(f"the run ended early: {(folder.parent / 'said').read_text(encoding='utf-8')}")
        time.sleep(0.01)


def status_of(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert main(command(folder)) == 0
    return folder


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGTERM, 0), (signal.SIGINT, 1)])
def test_a_signal_reaches_the_workers_too_and_the_run_is_saved(tmp_path, uninterrupted, number, workers):
    folder = tmp_path / "run"
    process = start(folder, f"training.workers={workers}", delay="0.003" if not workers else "0.01")
    wait_for_metrics(process, folder, 4)
    os.killpg(process, number)
    assert status_of(process) == 128 + number
    said = (tmp_path / "said").read_text(encoding="utf-8")
    assert f"stopped by {number.name} at step {final(folder).step};" in said and "same command" in said
    assert "Traceback" not in said
    assert main(command(folder)) == 0
    assert_same_run(folder, uninterrupted, STEPS)


def test_after_a_sigkill_a_truncated_newest_checkpoint_is_reported_and_skipped(tmp_path, uninterrupted, capsys):
    folder = tmp_path / "run"
    process = start(folder, delay="0.003")
    wait_for_metrics(process, folder, 10)
    os.kill(process, signal.SIGKILL)
    assert status_of(process) == -signal.SIGKILL and 0 < final(folder).step < STEPS
    newest = Checkpoints(folder / "checkpoints").paths()[-1]
    with (newest / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    assert main(command(folder, "--resume", str(newest))) == 2
    err = capsys.readouterr().err
    assert "model.safetensors" in err and "does not match its checksum" in err
    assert main(command(folder)) == 0
    out = capsys.readouterr().out.replace("\n", "")
    assert f"skipped: {newest} is damaged" in out and f"continuing from {folder / 'checkpoints'}" in out
    assert_same_run(folder, uninterrupted, STEPS)


@pytest.mark.skipif(TORCH < (2, 9), reason="other initial weights: the best step is the last")
def test_a_damaged_best_is_named_kept_aside_and_replaced(tmp_path, uninterrupted, capsys):
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted, folder)
    checkpoints = Checkpoints(folder / "checkpoints")
    names = [path.name for path in checkpoints.paths()]
    best = checkpoints.named("best")
    assert best.name != names[-1], "the stand-in's best step must not be its last"
    (best / "training.pt").write_bytes(b"")
    assert main(command(folder)) == 0
    said = capsys.readouterr().out.replace("\n", " ")
    assert "the best checkpoint so far cannot be used" in said and "takes its place" in said
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert f"step_{summary['test']['step']:08d}" in names
    assert (folder / "checkpoints" / f"superseded_{best.name}_0").is_dir()
    assert load_run(folder, "best")[2] == summary["test"]["step"]


def test_a_best_that_vanishes_before_the_test_ends_the_run_with_status_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("cached_lab.experiments.run._test_last", lambda trainer, test: vanish(trainer))

    def vanish(trainer):
        shutil.rmtree(trainer.folder / "checkpoints")

    assert main(command(tmp_path / "run")) == 1
    assert "there is no such folder; the same command goes on" in capsys.readouterr().err


def test_a_cut_configuration_never_falls_back_to_defaults(tmp_path, uninterrupted):
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted, folder)
    lines = (folder / "config.yaml").read_text(encoding="utf-8").splitlines(keepends=True)
    for cut in ("", *("".join(lines[:count]) for count in range(1, len(lines))), "".join(lines)[:-1]):
        (folder / "config.yaml").write_text(cut, encoding="utf-8")
        with pytest.raises(ValueError, match=r"config\.yaml.*`cached train`"):
            read_run_config(folder)
    assert main(command(folder)) == 0
    assert (folder / "config.yaml").read_text(encoding="utf-8") == "".join(lines)


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
