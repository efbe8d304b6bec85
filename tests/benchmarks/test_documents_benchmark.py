"""Packed documents beside rows of their own: the same tokens in every way, and a row for every size."""

from __future__ import annotations

import pytest
import torch

from cached_lab.experiments.benchmarks import documents
from cached_lab.experiments.benchmarks.peers import Sizes

SMALL = Sizes(vocabulary=16, width=8, depth=1, heads=1, segment=8, segments=2, rows=2, memory=4, tokens=2)


def test_a_row_for_every_memory_and_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "BASE", SMALL)
    rows = documents.run(1, "cpu", ["none", "rmt"], (3, 20))
    assert [(r.memory, r.length) for r in rows] == [("none", 3), ("none", 20), ("rmt", 3), ("rmt", 20)]
    assert all(r.packed.median > 0 and r.padded.median > 0 for r in rows)
    assert all(r.packed_tokens >= 1 and r.padded_tokens >= 1 for r in rows)
    assert rows[0].documents > rows[1].documents
    assert documents.as_markdown(rows).splitlines()[-1].startswith("| rmt | 20 |")


def test_documents_fill_all_rows() -> None:
    ids_BN = documents.documents_of(SMALL, 3)
    assert ids_BN.shape == (2, 16) and (ids_BN[:, 0] == 0).all()
    assert set(ids_BN.diff().unique().tolist()) == {0, 1}
    assert torch.equal(ids_BN, documents.documents_of(SMALL, 3))
