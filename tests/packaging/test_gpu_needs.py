"""`make test-gpu` reports missing hardware, and runs all tests marked for it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import needs

PROJECT = Path(__file__).resolve().parents[2]
FIND = importlib.util.find_spec


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """These modules cannot be found."""

    def find(name: str, *more: Any) -> Any:
        return None if name in names else FIND(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", find)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert needs.main("cpu") == 0
    without(monkeypatch, "pytest", "yaml", "timm")
    assert needs.main("cpu") == 1
    assert capsys.readouterr().err == "test-gpu lacks: pyyaml, pytest>=8\n"
    without(monkeypatch, "timm")
    assert needs.main("cpu") == 0
    assert capsys.readouterr().out == "timm is not installed: the tests of its models are skipped\n"


def test_a_missing_gpu_and_an_old_pytest_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(needs, "version", lambda name: "7.4.0")
    old, gpu = needs.lacking("cuda")
    assert old == "pytest>=8 (here is 7.4.0)" and "DEVICE=cpu" in gpu


def test_every_test_of_devices_is_marked() -> None:
    files = sorted((PROJECT / "tests" / "devices").glob("test_*.py"))
    assert files and all("pytestmark = pytest.mark.device" in file.read_text() for file in files)
    (line,) = re.findall(r"^test-gpu:.*\n(?:\t.*\n)+", (PROJECT / "Makefile").read_text(), re.M)
    assert "install" not in line and "grep -rl --include='test_*.py' 'pytest.mark.device' tests" in line
