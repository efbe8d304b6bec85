"""Proof that compressed slots remember: a symbol that only they still hold is asked for.

Legend: B rows, N tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from cached_transformers.models import create_model
from cached_transformers.training.segments import SegmentLoop

SEGMENTS, SEGMENT, CLASSES = 4, 4, 4


class Latch(NamedTuple):
    """Noise with one symbol in the first segment; the last token asks which."""

    tokens_BN: Tensor
    targets_BN: Tensor


def latch(rows: int, generator: torch.Generator) -> Latch:
    tokens = torch.randint(CLASSES, 2 * CLASSES, (rows, SEGMENTS * SEGMENT), generator=generator)
    answer = torch.randint(0, CLASSES, (rows,), generator=generator)
    place = torch.randint(0, SEGMENT, (rows,), generator=generator)
    tokens[torch.arange(rows), place] = answer
    tokens[:, -1] = 2 * CLASSES
    targets = torch.full_like(tokens, -100)
    targets[:, -1] = answer
    return Latch(tokens, targets)


def accuracy(memory: Any, steps: int = 300) -> float:
    """Share of new streams answered after training; one layer, so that nothing is passed on from layer to layer."""
    torch.manual_seed(0)
    model = create_model(
        "language_model",
        vocabulary=2 * CLASSES + 1,
        width=32,
        depth=1,
        heads=2,
        feed_forward=64,
        memory=memory,
        tied=False,
    )
    loop, optimizer = SegmentLoop(model, SEGMENT), torch.optim.AdamW(model.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        loop(*latch(64, generator))[0].backward()
        optimizer.step()
    tokens, targets = latch(512, torch.Generator().manual_seed(2))
    model.eval()
    with torch.no_grad():
        state = None
        for segment in tokens.split(SEGMENT, 1):
            out = model(segment, state)
            state = out.state
    return (out.outputs[:, -1].argmax(-1) == targets[:, -1]).float().mean().item()


@pytest.mark.parametrize("function", ["conv", "mean"])
def test_it_answers_what_lies_beyond_the_recent_memory(function: str) -> None:
    """The symbol is 12 to 15 tokens back: past 4 recent inputs, within 3 slots of 4 more each."""
    assert accuracy({"name": "compressive", "length": 4, "compressed": 3, "rate": 4, "function": function}) > 0.95


@pytest.mark.parametrize("memory", [None, {"name": "transformer_xl", "length": 4}])
def test_without_compressed_slots_it_guesses(memory: Any) -> None:
    assert accuracy(memory) < 0.4
