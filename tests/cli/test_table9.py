"""`cached reproduce table9`: throughput, measured and written with its circumstances."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cached_lab.cli.main import main
from cached_lab.experiments.costs.throughput import MODELS
from cached_lab.experiments.costs.timing import Ratio
from cached_lab.experiments.reproductions.table9 import TABLE9, beside_the_paper


def test_it_measures_what_was_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["batch=1", "rounds=1", "image_size=64"]
    assert main(["reproduce", "table9", "--rows", "PVT-Tiny", *settings, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    content = json.loads((tmp_path / "throughput.json").read_text(encoding="utf-8"))
    assert [row["case"] for row in content["rows"]] == ["plain", "GRC", "GRC, released variant"]
    assert {row["model"] for row in content["rows"]} == {"PVT-Tiny"}
    assert [content["environment"][key] for key in ("batch", "rounds", "image_size")] == [1, 1, 64]
    plain, paper, released = content["rows"]
    assert plain["train_flops_ratio"] == 1 < paper["train_flops_ratio"] < released["train_flops_ratio"]
    for row in content["rows"]:
        assert row["train_images"] == pytest.approx(1 / row["train"]["seconds"])
    text = (tmp_path / "throughput.md").read_text(encoding="utf-8")
    assert "| PVT-Tiny | plain |" in text and text.count("in the paper (V100) 1.22 and 1.21") == 2
    assert "| PVT-Tiny | GRC |" in printed and "written:" in printed


def test_the_sentence_beside_the_paper_has_the_measured_ratios() -> None:
    times = {"train": Ratio(1.3, 1.2, 1.4, 0.5, 1.25), "inference": Ratio(1.1, 1.0, 1.2, 0.5, 1.05)}
    cases = (("PVT-Tiny", "plain"), ("PVT-Tiny", "GRC"), ("ViT-S", "GRC"))
    (line,) = beside_the_paper([{"model": model, "case": case, **times} for model, case in cases])
    assert line == (
        "PVT-Tiny, GRC: training takes 1.30 times as long as the plain model, inference 1.10; in the paper (V100) 1.22 "
        "and 1.21."
    )


def test_its_models_are_those_of_the_benchmark() -> None:
    for models in TABLE9.models.values():
        assert set(models) <= set(MODELS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "PVT-tiny"], "did you mean 'PVT-Tiny'"),
        (["--rows", "ViT-S,ViT-S"], "must be paper, all, or different names"),
        (["btach=1"], "unknown setting of table9 'btach'; did you mean 'batch'"),
        (["batch=0"], "batch must be a whole number from 1 on"),
    ],
)
def test_bad_input_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["reproduce", "table9", *arguments, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
