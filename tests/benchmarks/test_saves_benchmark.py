"""Saves at once and in the background: each way saves as often as it says, and has its row."""

from __future__ import annotations

from cached_lab.experiments.benchmarks import saves


def test_every_way_has_its_saves_and_runs() -> None:
    rows = saves.run(1, "cpu", steps=4, every=1, width=16)
    assert [(row.way, len(row.stalls), len(row.whole)) for row in rows] == [
        ("none", 0, 1),
        ("sync", 3, 1),
        ("async", 3, 1),
    ]
    assert all(row.mebibytes > 0.1 and sum(row.stalls) < row.whole[0] for row in rows)
    assert [line.split(" | ")[0] for line in saves.as_markdown(rows).splitlines()[2:]] == [
        "| none",
        "| sync",
        "| async",
    ]
