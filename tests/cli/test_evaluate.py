"""`cached evaluate`: a split that is absent, and --with-memory, a memory without weights for a trained model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli.made import train_on_bytes

from cached_lab.cli.main import main
from cached_lab.experiments.evaluate import Evaluation
from cached_lab.tasks.recipes import config_from_dict

pytestmark = pytest.mark.usefixtures("no_run_reports")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, no_run_reports: None) -> Path:
    """A run without a memory, which has hardly trained."""
    return train_on_bytes(tmp_path_factory.mktemp("trained"), "model.memory=null", "training.steps=20")


def evaluated(trained: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["evaluate", str(trained), *words, "--json", "--device", "cpu"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def refused(trained: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["evaluate", str(trained), *words, "--device", "cpu"]) != 0
    return capsys.readouterr().err


def test_windows_read_on_and_say_what_they_are(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = {"none": evaluated(trained, capsys)["scores"][0]["loss"]}
    for name in ("streaming_llm", "tova", "h2o", "transformer_xl"):
        result = evaluated(trained, capsys, "--with-memory", name, f"{name}.length=5")
        assert result["memory"] == {"name": name, "relative": False, "length": 5}
        losses[name] = result["scores"][0]["loss"]
        assert len(result["scores"][0]["carried"]) > 3  # the loss by segments read before
    assert len(set(losses.values())) == len(losses), losses


def test_a_window_of_a_segment_is_that_of_transformer_xl(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without sinks, StreamingLLM is a window: with rotary or no positions, Transformer-XL's of the same length."""
    sizes = {"streaming_llm": ["streaming_llm.length=6", "streaming_llm.sinks=0"], "transformer_xl": []}
    sizes["transformer_xl"].append("transformer_xl.length=6")
    found = [evaluated(trained, capsys, "--with-memory", name, *more)["scores"][0] for name, more in sizes.items()]
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-5)


def test_a_memory_is_scored_beside_none_a_window_and_the_whole_text(trained: Path, capsys, monkeypatch) -> None:
    result = evaluated(trained, capsys, "--with-memory", "tova", "tova.length=12", "--memory", "carry,reset")
    scores = {row["memory"]: row for row in result["scores"]}
    loss = {name: row["loss"] for name, row in scores.items()}
    assert list(loss) == ["carry", "reset", "no memory", "window of 12 tokens", "whole text"]
    window = ("--with-memory", "streaming_llm", "streaming_llm.length=12", "streaming_llm.sinks=0")
    alone = {"no memory": (), "window of 12 tokens": window, "whole text": ("--segment-length", "1000")}
    for name, words in alone.items():  # the whole text is attention over all that a row reads, as one segment
        assert evaluated(trained, capsys, *words)["scores"][0]["loss"] == pytest.approx(loss[name], rel=1e-5)
    gain = loss["no memory"] - loss["whole text"]
    assert gain > 0 and "Efficiency" in result["efficiency"]
    for name, row in scores.items():
        assert row["efficiency"] == pytest.approx((loss["no memory"] - loss[name]) / gain, abs=1e-6)
    all_of_it = evaluated(trained, capsys, "--with-memory", "h2o", "h2o.length=500")["scores"]
    assert all_of_it[0]["efficiency"] == pytest.approx(1, abs=1e-3)
    own = evaluated(trained, capsys, *window)["scores"]
    assert [row["memory"] for row in own] == ["carry", "no memory", "whole text"]
    monkeypatch.setattr("cached_lab.experiments.evaluate.WHOLE_TEXT", 50)
    assert main(["evaluate", str(trained), "--with-memory", "tova", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "window of" in printed and "whole text  " not in printed and "is read up to 50" in printed


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (["--with-memory", "rmt"], ["memory 'rmt' has weights", "streaming_llm, tova, h2o"]),
        (["--with-memory", "no_such"], ["no_such"]),
        (["tova.length=5"], ["--with-memory"]),
        (["--with-memory", "tova", "tova.size=5"], ["unknown option of memory 'tova' 'size'"]),
    ],
)
def test_unfit_memories_are_refused(trained: Path, capsys, words: list[str], messages: list[str]) -> None:
    said = refused(trained, capsys, *words)
    assert all(message in said for message in messages)


def test_a_model_that_has_a_memory_keeps_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train_on_bytes(tmp_path)
    assert "was trained with the memory" in refused(run, capsys, "--with-memory", "tova")
    assert "trained on the whole text" in evaluated(run, capsys)["efficiency"], "why there is no number"


def test_a_split_that_is_absent_is_refused_with_the_one_that_is_there(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / "images" / split / "a").mkdir(parents=True)
    tree = {
        "name": "run",
        "data": {"name": "image_folder", "path": str(tmp_path / "images"), "image_size": 8},
        "model": {"name": "vision_transformer", "patch_size": 4, "width": 8, "depth": 1, "heads": 1},
        "training": {"steps": 1, "batch_size": 1, "test": "none"},
    }
    with pytest.raises(ValueError, match=r"training.test=none"):
        Evaluation(tmp_path, config_from_dict(tree), "best", "test", ["carry"]).score("cpu")
