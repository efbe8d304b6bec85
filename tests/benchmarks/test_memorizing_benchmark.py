"""The benchmark of a large store measures what it says, on a small one."""

from __future__ import annotations

import types
from typing import Any

import pytest

from cached_lab.cli.main import main
from cached_lab.experiments.benchmarks import memorizing, named


def test_its_tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memorizing, "SEGMENT", 16)
    assert main(["benchmark", "memorizing", "--lengths", "64,96", "--tokens", "320", "--rounds", "1"]) == 0
    stores, text = capsys.readouterr().out.split("\n\n")[:2]
    assert [line.split("|")[1].strip() for line in stores.splitlines()[2:]] == ["64", "96"]
    assert "320 tokens with 64 keys" in text and text.splitlines()[0].count("/10") == 10


def test_what_does_not_fit_is_left_out_and_no_text_is_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memorizing, "SEGMENT", 16)
    monkeypatch.setattr(memorizing, "FITS", 0)
    row = memorizing.measure(64, 1)
    assert row.plain is row.kept is None and row.read.median > 0
    shown = memorizing.as_markdown([row], [memorizing.Tenth(32, 1.0, 2.0)])
    assert shown.splitlines()[2].count("does not fit") == 2
    with pytest.raises(ValueError, match=r"100.*10.*16"):
        memorizing.run(1, (64,), 100)


def test_it_runs_on_the_device_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    tenth = memorizing.Tenth(32, 1.0, 2.0)
    monkeypatch.setattr(memorizing, "run", lambda *given: asked.append(given) or ([memorizing.measure(64, 1)], [tenth]))
    monkeypatch.setattr(memorizing, "SEGMENT", 16)
    options: Any = types.SimpleNamespace(rounds=1, lengths=(64,), tokens=320)
    named.BENCHMARKS["memorizing"](options, "cuda")
    assert asked == [(1, (64,), 320, "cuda")]
    assert {t.device.type for t in memorizing.build(64, "meta").state_dict().values()} == {"meta"}
