"""`cached benchmark NAME` and `python benchmarks/NAME.py`: options, refusals, numbers of the timing core."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from docs.pages import commands

from benchmarks import attentions, command
from cached_lab.cli import benchmark
from cached_lab.cli.main import main
from cached_lab.experiments.costs import timing


def test_ratios_are_medians_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = {"a": iter([9.0, 1.0, 2.0, 4.0]), "b": iter([9.0, 1.0, 1.0, 1.0])}
    order = []

    def seconds(call: object) -> float:
        name = str(call)
        order.append(name)
        return next(spent[name])

    monkeypatch.setattr(timing, "seconds_of", seconds)
    found = timing.compare({"a": "a", "b": "b"}, "b", 3)  # type: ignore[dict-item]
    assert found["a"] == timing.Ratio(median=2.0, low=1.0, high=4.0, seconds=2.0, fastest=1.0)
    assert found["b"].median == found["b"].fastest == 1 and str(found["a"]) == "2.000x (1.000-4.000)"
    assert order == ["b", "a", "a", "b", "b", "a", "a", "b"], "the order alternates, the first round is not counted"


def test_a_training_step_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 1).eval()
    before = model.weight.clone()
    timing.training_step(model, lambda: model(torch.ones(1, 2)).sum())()
    assert model.training and not torch.equal(before, model.weight)
    assert timing.seconds_of(lambda: None) >= 0


def test_every_script_runs_by_its_path() -> None:
    assert set(benchmark.BENCHMARKS) == {
        path.stem for path in benchmark.FOLDER.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")
    }
    script = [sys.executable, str(benchmark.FOLDER / "diagonal.py"), "--help"]
    assert "--lengths" in subprocess.run(script, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("words", [words for _, words in commands("cached") if words[1:2] == ["benchmark"]])
def test_commands_of_the_pages_are_understood(words: list[str]) -> None:
    import importlib

    name, options = words[2], words[3:]
    command.parser_of(importlib.import_module(f"benchmarks.{name}")).parse_args(options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["visoin"], "'visoin'; did you mean 'vision'"),
        (["generation", "--memories", "rmtt"], "'rmtt'; did you mean 'rmt'"),
        (["attentions", "--attentions", "softmaxx"], "'softmaxx'; did you mean 'softmax'"),
        (["vision", "--models", "ViT"], "'ViT'"),
        (["context", "--memories", "rmtt"], "'rmtt'; did you mean 'rmt'"),
        (["prefill", "--models", "gpt22"], "architecture=gpt22"),
        (["record", "--blocks", "1"], "--blocks 1"),
        (["attentions", "--attentions", "sac", "--lengths", "8192"], "sac is measured up to 4096"),
    ],
)
def test_bad_input_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["benchmark", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["generation", "--segments", "0"], ["vision", "--image-size", "0"]])
def test_numbers_below_their_least_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["benchmark", *arguments])
    assert arguments[1].split("=")[0] in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["benchmark", "grc", "--device", "cuda"]) == 2
    assert "--device cuda" in capsys.readouterr().err


def test_an_installation_without_scripts_says_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "FOLDER", tmp_path)
    assert main(["benchmark", "grc"]) == 2
    assert "python benchmarks/grc.py" in capsys.readouterr().err


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
