"""The translation benchmark: equal models, equal work, and a table that says so."""

from __future__ import annotations

import pytest
import torch
from integrations.hosts import library

from cached_lab.experiments.benchmarks import translation
from cached_lab.experiments.benchmarks.translation import Sizes, as_markdown, make_batch

SMALL = Sizes(16, 1, 2, 24, 40, 0.1, rows=3, tokens=6, sentences=2, beams=2, written=3, alone=1, long=5)


def test_every_model_is_measured_in_training_and_in_beam_search() -> None:
    library("transformers")
    rows, kept = translation.run(1, "cpu", SMALL)
    assert [row.case for row in rows] == ["plain", "GRC", "BART of transformers", "Marian of transformers"]
    assert [k.case for k in kept] == ["kept", "read again"]
    assert all(row.train_tokens > 0 and row.decode_tokens > 0 for row in rows)
    plain, _, bart, _ = rows
    places, bias = 2 * 514 * SMALL.width, SMALL.vocabulary  # theirs are learned, and its bias is a buffer
    assert bart.parameters - places == plain.parameters - bias
    table = as_markdown(rows, kept)
    assert "| plain | 0.01 | 1 | 1 |" in table and "| kept | 5 | 1 |" in table


def test_the_same_losses_are_computed() -> None:
    """Ours and theirs are the mean over the targets that are no padding."""
    batch = make_batch(SMALL, 12, "cpu")
    assert batch.padding.any() and not batch.padding[0].any()
    case = translation.ours(SMALL, None)
    case.model.eval()
    out = case.model(batch.inputs, batch.decoder_inputs, batch.padding).outputs
    want = torch.nn.functional.cross_entropy(out.flatten(0, 1), batch.targets.flatten())
    assert float(case.loss(batch)) == pytest.approx(float(want), rel=1e-5)
