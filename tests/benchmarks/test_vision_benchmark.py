"""`cached benchmark vision`: what it counts and reports, on a model small enough to be timed in a moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.hosts import library

from cached_lab.cli.main import main
from cached_lab.experiments.benchmarks import vision
from cached_lab.experiments.costs.flops import count_flops, count_parameters

SIDE = 32


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    library("timm")
    monkeypatch.setattr(vision, "MODELS", {"small": "pvt_v2_b0", "PVT": "pvt_tiny"})


def test_rows_hold_what_was_counted_and_timed() -> None:
    rows = vision.run(2, 1, "cpu", models=["small"], image_size=SIDE, released=True)
    assert [r.case for r in rows] == list(vision.CASES)
    plain, cached, released = rows
    models = vision.build("pvt_v2_b0", SIDE, list(vision.CASES))
    images = torch.randn(2, 3, SIDE, SIDE)
    for row, model in zip(rows, models.values(), strict=True):
        assert row.parameters == count_parameters(model)
        forward = count_flops(model, images, mode="train") / count_flops(models["plain"], images, mode="train")
        assert row.train_flops_ratio == forward
        assert row.train_images == pytest.approx(2 / row.train.seconds)
        assert row.inference_images == pytest.approx(2 / row.inference.seconds) and row.inference_images > 0
        weights = 4 * row.parameters / 2**20
        assert row.train_peak_mib > weights > row.inference_peak_mib > 0  # gradients at least; activations alone
    assert plain.train.median == plain.inference.median == plain.train_flops_ratio == plain.inference_flops_ratio == 1
    assert plain.train.fastest == plain.inference.fastest == 1 and cached.train.fastest > 0
    assert 1 < cached.train_flops_ratio < released.train_flops_ratio
    assert 1 < cached.inference_flops_ratio < released.inference_flops_ratio
    table = vision.as_markdown(rows).splitlines()
    assert len(table) == 5 and len({line.count("|") for line in table}) == 1


def test_cases_begin_with_the_same_weights() -> None:
    models = vision.build("pvt_tiny", SIDE, list(vision.CASES))
    plain = models["plain"].state_dict()
    for model in models.values():
        assert all(torch.equal(model.state_dict()[key], value) for key, value in plain.items())


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "vision.json"
    command = ["benchmark", "vision", "--models", "PVT", "--batch", "1", "--rounds", "1", "--image-size", str(SIDE)]
    assert main([*command, "--channels-last", "--device", "cpu", "--output", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    assert [row["case"] for row in found["rows"]] == ["plain", "GRC"]
    assert found["environment"]["image_size"] == SIDE and found["environment"]["channels_last"] is True
    assert "| PVT | GRC |" in capsys.readouterr().out


def test_unknown_models_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"'smal'.*'small'"):
        vision.run(1, 1, "cpu", models=["smal"])
    assert main(["benchmark", "vision", "--image-size", "0"]) != 0
    assert "--image-size 0 must be at least 1" in capsys.readouterr().err
