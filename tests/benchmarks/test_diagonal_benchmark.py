"""Diagonals beside the plain order: both are measured, of every size that is asked for."""

from __future__ import annotations

import pytest

from cached_lab.experiments.benchmarks import diagonal
from cached_lab.experiments.benchmarks.peers import Sizes


def test_a_row_for_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagonal, "BASE", Sizes(vocabulary=16, heads=1, segments=2, rows=1))
    monkeypatch.setattr(diagonal, "DEPTHS", (2,))
    monkeypatch.setattr(diagonal, "WIDTHS", (4, 8))
    rows = diagonal.run(1, "cpu", ["grc_stream"], (4,))
    assert [(r.memory, r.depth, r.width, r.segment) for r in rows] == [("grc_stream", 2, width, 4) for width in (4, 8)]
    assert all(r.step.median > 0 and r.forward.median > 0 for r in rows)
    assert diagonal.as_markdown(rows).splitlines()[-1].startswith("| grc_stream | 2 | 8 | 4 |")
