"""`cached reproduce table9`: throughput, measured and written with its circumstances."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cached_lab.cli.main import main
from cached_lab.experiments.costs.throughput import CASES, MODELS
from cached_lab.experiments.costs.timing import Ratio
from cached_lab.experiments.reproductions import table9
from cached_lab.experiments.reproductions.table9 import ROWS, beside_the_paper


def canned(batch: int, rounds: int, device: str, *, models: Sequence[str], image_size: int) -> list[dict[str, Any]]:
    """Return rows as `measure_throughput` does; tests/benchmarks/test_image_benchmarks.py measures."""
    counts = dict.fromkeys(("train_images", "inference_images", "train_peak_mib", "inference_peak_mib"), float(batch))
    counts |= {"parameters": image_size, "train_flops_ratio": 1.1, "inference_flops_ratio": 1.0}
    times = {"train": Ratio(1.3, 1.2, 1.4, 0.5, 1.25), "inference": Ratio(1.1, 1.0, 1.2, 0.5, rounds)}
    return [{"model": name, "case": case, **counts, **times} for name in models for case in CASES]


def test_it_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table9, "measure_throughput", canned)
    settings = ["batch=1", "rounds=1", "image_size=64"]
    assert main(["reproduce", "table9", "--rows", "PVT-Tiny", *settings, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    content = json.loads((tmp_path / "throughput.json").read_text(encoding="utf-8"))
    assert [row["case"] for row in content["rows"]] == ["plain", "GRC", "GRC, released variant"]
    assert {row["model"] for row in content["rows"]} == {"PVT-Tiny"}
    assert [content["environment"][key] for key in ("batch", "rounds", "image_size")] == [1, 1, 64]
    assert content["rows"][0]["train"]["median"] == 1.3 and content["rows"][0]["parameters"] == 64
    text = (tmp_path / "throughput.md").read_text(encoding="utf-8")
    assert "| PVT-Tiny | plain |" in text and text.count("in the paper (V100) 1.22 and 1.21") == 2
    assert "| PVT-Tiny | GRC |" in printed and "written:" in printed


def test_the_sentence_beside_the_paper_has_the_measured_ratios() -> None:
    (line, _) = beside_the_paper(canned(1, 1, "cpu", models=["PVT-Tiny", "ViT-S"], image_size=32))
    assert line == (
        "PVT-Tiny, GRC: training takes 1.30 times as long as the plain model, inference 1.10; in the paper (V100) 1.22 "
        "and 1.21."
    )


def test_its_models_are_those_of_the_benchmark() -> None:
    for models in ROWS.values():
        assert set(models) <= set(MODELS)
