"""Expire-Span learns what is worth keeping: a symbol among noise and other symbols, asked for 32 tokens later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from memories.learning import accuracy, trained, untrained

from cached_lab.experiments.probes.tasks import Latch

TASK, DISTANCE = Latch(decoys=True), 7
BEGINS: dict[str, Any] = {"name": "expire_span", "length": 64, "longest": 48, "ramp": 16, "initial": 0.4, "price": 0.1}
"""Spans begin at 19 tokens, so that what is older stands on the ramp, or just behind it."""


def spans(model: Any) -> torch.Tensor:
    """(V,): of each token in the first layer, whose inputs are nothing but tokens."""
    with torch.no_grad():
        found: torch.Tensor = model.stack.blocks[0].attention.memory.spans(model.embedding.weight)
    return found


def test_it_keeps_what_is_asked_for_and_drops_the_rest() -> None:
    """All is stored in training; afterwards a single slot holds all that is needed, in as many tokens."""
    model: Any = trained(TASK, BEGINS, 100, distance=DISTANCE)
    assert accuracy(model, TASK, DISTANCE) > 0.99
    found = spans(model)
    cues, others = found[: TASK.classes], found[TASK.classes : -1]
    assert cues.min() > 26 and others.max() < 10, "a cue is asked for after 29 to 32 tokens"
    small: Any = untrained(TASK, {**BEGINS, "length": 1, "evict": True}).eval()
    small.load_state_dict(model.state_dict())
    assert accuracy(small, TASK, DISTANCE) > 0.99
    assert accuracy(small, TASK, DISTANCE, forget=True) < 0.4


@pytest.mark.slow
def test_without_a_price_what_is_of_no_use_may_stay() -> None:
    model = trained(TASK, {**BEGINS, "price": 0}, 100, distance=DISTANCE)
    assert accuracy(model, TASK, DISTANCE) > 0.99
    assert spans(model)[TASK.classes : -1].max() > 10
