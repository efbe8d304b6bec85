"""`cached benchmark attentions`: its counts, table and figure."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks import attentions
from cached_lab.cli.main import main


def test_the_slope_is_the_exponent_of_the_longer_half() -> None:
    seconds = {n: 3e-9 * n**1.5 for n in (512, 1024, 2048, 4096)} | {128: 1.0}
    assert attentions.slope(seconds) == pytest.approx(1.5)
    assert math.isnan(attentions.slope({512: 1.0}))


def test_the_command_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "attentions.json"
    arguments = ["--attentions", "softmax", "--lengths", "64,32", "--rounds", "1", "--output", str(file)]
    assert main(["benchmark", "attentions", *arguments]) == 0
    out = capsys.readouterr().out
    assert "| softmax | N^2 | 1.00 | 1.00 |" in out
    row = json.loads(file.read_text(encoding="utf-8"))["rows"][0]
    assert set(row["seconds"]) == {"32", "64"} and row["seconds"]["64"] > 0
    # Queries, keys, values and their gradients are 6 x 64 x 256 numbers; the step makes the gradients.
    assert row["mebibytes"]["64"] > 3 * 64 * 256 * 4 / 2**20


def test_too_long_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(attentions.LONGEST, "sac", 16)
    arguments = ["--attentions", "softmax,sac", "--rounds", "1", "--output", str(tmp_path / "a.json")]
    assert main(["benchmark", "attentions", "--lengths", "16,32", *arguments]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("| sac"))
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert float(cells[2]) > 0 and cells[3:7] == ["", "", "nan", ""]  # neither time nor operations at 32
    assert main(["benchmark", "attentions", "--lengths", "32", *arguments]) == 2
    assert "sac is measured up to 16 tokens" in capsys.readouterr().err
