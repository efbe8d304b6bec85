"""`cached evaluate RUN --with-memory`: a memory without weights for a model that was trained without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli.made_text import train_on_bytes

from cached_lab.cli.main import main


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a memory, which has hardly trained."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("trained")
        patch.setattr("cached_lab.experiments.run.write_report", lambda *_: None)
        return train_on_bytes(folder, "model.memory=null", "training.steps=20")


def evaluated(trained: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["evaluate", str(trained), *words, "--json", "--device", "cpu"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def refused(trained: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["evaluate", str(trained), *words, "--device", "cpu"]) != 0
    return capsys.readouterr().err


def test_windows_read_on_and_say_what_they_are(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = evaluated(trained, capsys)["scores"][0]
    losses = {"none": plain["loss"]}
    for name in ("streaming_llm", "tova", "h2o", "transformer_xl"):
        result = evaluated(trained, capsys, "--with-memory", name, f"{name}.length=5")
        assert result["memory"] == {"name": name, "relative": False, "length": 5}
        losses[name] = result["scores"][0]["loss"]

        assert len(result["scores"][0]["carried"]) > 3  # the loss by segments read before
    assert len(set(losses.values())) == len(losses), losses


def test_a_window_of_a_segment_is_that_of_transformer_xl(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without sinks, StreamingLLM is a window: with rotary or no positions, Transformer-XL's of the same length."""
    window = evaluated(
        trained, capsys, "--with-memory", "streaming_llm", "streaming_llm.length=6", "streaming_llm.sinks=0"
    )
    other = evaluated(trained, capsys, "--with-memory", "transformer_xl", "transformer_xl.length=6")
    assert window["scores"][0]["loss"] == pytest.approx(other["scores"][0]["loss"], rel=1e-5)


def test_untrained_weights_are_refused(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(trained, capsys, "--with-memory", "rmt")
    assert "memory 'rmt' has weights" in message and "streaming_llm, tova, h2o" in message
    assert "no_such" in refused(trained, capsys, "--with-memory", "no_such")
    assert "--output-cache or --with-memory" in refused(trained, capsys, "tova.length=5")
    assert "unknown option of memory 'tova' 'size'" in refused(trained, capsys, "--with-memory", "tova", "tova.size=5")
    assert "--with-memory" in refused(trained, capsys, "--with-memory", "tova", "--output-cache", "neural")


def test_a_model_that_has_a_memory_keeps_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cached_lab.experiments.run.write_report", lambda *_: None)
        folder = train_on_bytes(tmp_path, "training.steps=2")
    capsys.readouterr()
    assert "was trained with the memory" in refused(folder, capsys, "--with-memory", "tova")
