"""Stores of hidden states: what is pushed, and what leaves."""

from __future__ import annotations

import pytest
import torch

from cached_transformers.memories.parts.fifo_store import Rows, empty_rows, push, push_out


@pytest.mark.parametrize("tokens", [1, 3, 5, 9])
def test_what_is_kept_does_not_depend_on_whether_what_leaves_is_asked_for(tokens: int) -> None:
    """And without padding it is what it is with a mask of none."""
    generator = torch.Generator().manual_seed(tokens)
    states = [empty_rows(2, 5, 3, torch.zeros(()), 2)] * 3
    none = torch.zeros(2, tokens, dtype=torch.bool)
    for step in range(4):
        hidden = torch.randn(2, tokens, 3, generator=generator)
        positions = torch.arange(step * tokens, (step + 1) * tokens)[None, :, None].expand(1, -1, 2)
        states = [
            push(states[0], hidden, positions),
            push(states[1], hidden, positions, none),
            push_out(states[2], hidden, positions)[0],
        ]
        for other in states[1:]:
            assert all(torch.equal(a, b) for a, b in zip(states[0], other, strict=True))


def test_a_store_takes_its_own_dtype() -> None:
    rows = empty_rows(2, 4, 3, torch.zeros((), dtype=torch.float64))
    for tokens in (2, 6):
        found: Rows = push(rows, torch.ones(2, tokens, 3), torch.zeros(1, tokens, 1, dtype=torch.long))
        assert found.hidden_BMD.dtype == torch.float64 and found.positions_BMP.dtype == torch.long
        assert found.hidden_BMD.shape == (2, 4, 3) and found.count_B.tolist() == [min(tokens, 4)] * 2
