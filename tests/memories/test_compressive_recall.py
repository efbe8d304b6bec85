"""Proof that compressed slots remember: a symbol that only they still hold is asked for."""

from __future__ import annotations

from typing import Any

import pytest
from memories.learning import LATCH, accuracy, reach, trained

SIZES: dict[str, Any] = {"heads": 2, "model": {"tied": False}}


def compressive(function: str) -> dict[str, Any]:
    return {"name": "compressive", "length": 4, "compressed": 3, "rate": 4, "function": function}


@pytest.mark.parametrize("function", ["conv", "mean"])
def test_it_answers_what_lies_beyond_the_recent_memory(function: str) -> None:
    """The symbol is 12 to 15 tokens back: past 4 recent inputs, within 3 slots of 4 more each."""
    # The gradient crosses no segment, so that keeping symbols apart is left to the memory.
    assert accuracy(trained(LATCH, compressive(function), 300, bptt=1, **SIZES), LATCH) > 0.95


def test_without_compressed_slots_it_is_out_of_reach() -> None:
    for memory in (None, {"name": "transformer_xl", "length": 4}):
        assert reach(LATCH, memory, **SIZES) == 0 < reach(LATCH, compressive("mean"), **SIZES)
