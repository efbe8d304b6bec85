"""Peers of memories that cannot be measured are left out by name."""

from __future__ import annotations

from typing import Any

import pytest

from cached_transformers.experiments.benchmarks import memories
from cached_transformers.experiments.benchmarks.peers import PEERS, Sizes

TINY = Sizes(vocabulary=16, width=8, depth=1, heads=1, segment=4, segments=2, rows=1, memory=4, tokens=2)


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("memformer", "memformer is not installed"),
        ("einops_exts", "einops_exts, which memformer needs, is not installed"),
    ],
)
def test_a_peer_that_is_not_there_whole_is_left_out_by_name(
    missing: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(sizes: Sizes) -> Any:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setitem(PEERS, "memformer", PEERS["memformer"]._replace(build=build))
    row = memories.measure("memformer", TINY, 1)
    assert row.peer is None and row.peer_name == said
    assert memories.as_markdown([row]).splitlines()[-1].endswith(f"| {said} |")
