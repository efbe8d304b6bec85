"""Stopping and going on, with real signals: the result is that of a run never stopped, to the bit.

What is stopped is a process of its own; what goes on, or was never stopped, runs here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import standin
import yaml
from training.same_run import assert_same_run, final

from cached_transformers.cli.main import main
from cached_transformers.training.checkpoint import Checkpoints
from cached_transformers.training.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("no_run_reports")
STEPS = 40


def command(folder: Path, *arguments: str) -> list[str]:
    """`cached` training the stand-in."""
    recipe = folder.parent / "standin.yaml"
    tree = standin.recipe(steps=STEPS, evaluate_every=5, log_every=3)
    recipe.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return ["train", str(recipe), "--out", str(folder), *arguments]


def start(folder: Path, *arguments: str, delay: str) -> subprocess.Popen[str]:
    """Start it in a process of its own."""
    source = str(Path(standin.__file__).parents[2] / "src")
    path = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "STANDIN_DELAY": delay, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, standin.__file__, *command(folder, *arguments)]
    return subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def wait_for_metrics(process: subprocess.Popen[str], folder: Path, lines: int) -> None:
    """Wait until the run has written so many lines; fail when it ends before."""
    while len(read_metrics(folder / "metrics.jsonl")) < lines:
        if process.poll() is not None:
            pytest.fail(f"the run ended early: {finish(process)}")
        time.sleep(0.01)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert main(command(folder)) == 0
    return folder


def test_sigkill_then_resume_equals_a_run_never_stopped(tmp_path, uninterrupted, capsys):
    folder = tmp_path / "run"
    process = start(folder, delay="0.003")
    wait_for_metrics(process, folder, 8)
    process.send_signal(signal.SIGKILL)
    assert finish(process)[0] == -signal.SIGKILL
    stopped = final(folder).step
    assert 0 < stopped < STEPS
    assert main(command(folder)) == 0
    out = capsys.readouterr().out
    assert f"continuing from {folder / 'checkpoints' / f'step_{stopped:08d}'}" in out.replace("\n", "")
    assert_same_run(folder, uninterrupted, STEPS)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_a_checkpoint_and_says_how_to_go_on(tmp_path, uninterrupted, number, status):
    folder = tmp_path / "run"
    process = start(folder, delay="0.003")
    wait_for_metrics(process, folder, 4)
    process.send_signal(number)
    code, _, err = finish(process)
    assert code == status
    assert f"stopped by {signal.Signals(number).name} at step" in err and "same command again" in err
    assert "Traceback" not in err
    step = final(folder).step
    assert f"at step {step};" in err
    assert main(command(folder)) == 0
    assert_same_run(folder, uninterrupted, STEPS)


def test_control_c_reaches_the_workers_too_and_the_run_is_saved_all_the_same(tmp_path, uninterrupted):
    folder = tmp_path / "run"
    process = start(folder, "training.workers=1", delay="0.01")
    wait_for_metrics(process, folder, 4)
    os.killpg(process.pid, signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130 and "stopped by SIGINT at step" in err and "Traceback" not in err
    assert main(command(folder)) == 0
    assert_same_run(folder, uninterrupted, STEPS)


def test_a_truncated_newest_checkpoint_is_reported_and_skipped(tmp_path, uninterrupted, capsys):
    folder = tmp_path / "run"
    process = start(folder, delay="0.003")
    wait_for_metrics(process, folder, 10)
    process.kill()
    finish(process)
    newest = Checkpoints(folder / "checkpoints").paths()[-1]
    with (newest / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    assert main(command(folder, "--resume", str(newest))) == 2
    err = capsys.readouterr().err
    assert "model.safetensors" in err and "does not match its checksum" in err
    assert main(command(folder)) == 0
    assert f"skipped: {newest} is damaged" in capsys.readouterr().out.replace("\n", "")
    assert_same_run(folder, uninterrupted, STEPS)
