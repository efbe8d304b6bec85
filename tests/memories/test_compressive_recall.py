"""Proof that compressed slots remember: a symbol that only they still hold is asked for."""

from __future__ import annotations

from typing import Any

import pytest
from memories.learning import LATCH, accuracy, trained


def recalled(memory: Any) -> float:
    """Share of symbols recalled; the gradient crosses no segment, so that keeping them apart is left to the memory."""
    return accuracy(trained(LATCH, memory, 300, bptt=1, heads=2, model={"tied": False}), LATCH)


@pytest.mark.parametrize("function", ["conv", "mean"])
def test_it_answers_what_lies_beyond_the_recent_memory(function: str) -> None:
    """The symbol is 12 to 15 tokens back: past 4 recent inputs, within 3 slots of 4 more each."""
    assert recalled({"name": "compressive", "length": 4, "compressed": 3, "rate": 4, "function": function}) > 0.95


@pytest.mark.parametrize("memory", [None, {"name": "transformer_xl", "length": 4}])
def test_without_compressed_slots_it_guesses(memory: Any) -> None:
    assert recalled(memory) < 0.4
