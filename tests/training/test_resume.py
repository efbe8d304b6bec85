"""Stopping and going on, with real processes and signals: the result is that of a run never stopped, to the bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import standin
import torch
import yaml

from cached_transformers.training.checkpoint import Checkpoint, Checkpoints
from cached_transformers.training.metrics import read_metrics

STEPS = 40


def start(folder: Path, *arguments: str, delay: str = "0", **settings: object) -> subprocess.Popen[str]:
    """Start `cached train` on the stand-in, in a process of its own."""
    recipe = folder.parent / "standin.yaml"
    training = {"steps": STEPS, "evaluate_every": 5, "log_every": 3, **settings}
    recipe.write_text(yaml.safe_dump(standin.recipe(**training)), encoding="utf-8")
    command = [sys.executable, standin.__file__, "train", str(recipe), "--out", str(folder), *arguments]
    source = str(Path(standin.__file__).parents[2] / "src")
    path = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "STANDIN_DELAY": delay, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
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


def final(folder: Path) -> Checkpoint:
    checkpoint, problems = Checkpoints(folder / "checkpoints").newest_valid()
    assert checkpoint is not None and problems == []
    return checkpoint


def assert_same_run(left: Path, right: Path) -> None:
    """Weights, buffers, optimiser, random states and metrics are equal to the bit; times are not compared."""
    a, b = final(left), final(right)
    assert a.step == b.step == STEPS
    assert a.weights.keys() == b.weights.keys()
    for name in a.weights:
        assert torch.equal(a.weights[name], b.weights[name]), name
    timeless = [{k: v for k, v in c.training.items() if "seconds" not in k} for c in (a, b)]
    assert_same_tree(*timeless)
    lines = [[{**line, "seconds": 0} for line in read_metrics(folder / "metrics.jsonl")] for folder in (left, right)]
    assert lines[0] == lines[1]


def assert_same_tree(left: object, right: object) -> None:
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same_tree(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for pair in zip(left, right, strict=True):
            assert_same_tree(*pair)
    else:
        assert left == right


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    status, _, err = finish(start(folder))
    assert status == 0, err
    return folder


def test_sigkill_then_resume_equals_a_run_never_stopped(tmp_path, uninterrupted):
    folder = tmp_path / "run"
    process = start(folder, delay="0.003")
    wait_for_metrics(process, folder, 8)
    process.send_signal(signal.SIGKILL)
    assert finish(process)[0] == -signal.SIGKILL
    stopped = final(folder).step
    assert 0 < stopped < STEPS
    status, out, err = finish(start(folder))
    assert status == 0, err
    assert f"continuing from {folder / 'checkpoints' / f'step_{stopped:08d}'}" in out.replace("\n", "")
    assert_same_run(folder, uninterrupted)


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
    code, _, err = finish(start(folder))
    assert code == 0, err
    assert_same_run(folder, uninterrupted)


def test_control_c_reaches_the_workers_too_and_the_run_is_saved_all_the_same(tmp_path, uninterrupted):
    folder = tmp_path / "run"
    process = start(folder, "training.workers=1", delay="0.01")
    wait_for_metrics(process, folder, 4)
    os.killpg(process.pid, signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130 and "stopped by SIGINT at step" in err and "Traceback" not in err
    code, _, err = finish(start(folder))
    assert code == 0, err
    assert_same_run(folder, uninterrupted)


def test_a_truncated_newest_checkpoint_is_reported_and_skipped(tmp_path, uninterrupted):
    folder = tmp_path / "run"
    process = start(folder, delay="0.003")
    wait_for_metrics(process, folder, 10)
    process.kill()
    finish(process)
    newest = Checkpoints(folder / "checkpoints").paths()[-1]
    with (newest / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    code, _, err = finish(start(folder, "--resume", str(newest)))
    assert code == 2
    assert "model.safetensors" in err and "does not match its checksum" in err
    code, out, err = finish(start(folder))
    assert code == 0, err
    assert f"skipped: {newest} is damaged" in out
    assert_same_run(folder, uninterrupted)
