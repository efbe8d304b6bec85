"""Proof that a gated recurrent cache remembers: each stream emits a random segment, and then the same segment again.

Nothing but a memory tells what comes in the second segment; nothing at all tells what comes in the first. Without a
memory no loss below log V is possible on either; with one, a loss below log V on the first would mean that the future
leaked.

Legend: B rows, N tokens.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.models import create_model
from cached_transformers.training.segments import SegmentLoop

VOCABULARY, SEGMENT, STEPS = 8, 8, 800
CHANCE = math.log(VOCABULARY)


def streams(rows: int, generator: torch.Generator) -> Tensor:
    """(rows, 2 SEGMENT): a random segment and its repetition."""
    segment = torch.randint(0, VOCABULARY, (rows, SEGMENT), generator=generator)
    return torch.cat([segment, segment], 1)


def trained(memory: dict[str, Any] | None) -> nn.Module:
    torch.manual_seed(0)
    model = create_model(
        "language_model", vocabulary=VOCABULARY, width=48, depth=2, heads=2, feed_forward=96, memory=memory, tied=False
    )
    loop, optimizer = SegmentLoop(model, SEGMENT, bptt=2), torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = streams(32, generator)
        targets = tokens.roll(-1, 1)
        targets[:, [SEGMENT - 1, -1]] = -100  # what follows the last token of a segment is not asked
        optimizer.zero_grad()
        loop(tokens, targets)[0].backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def losses(model: nn.Module, forget: bool = False) -> tuple[float, float]:
    """Loss on first segments and on repetitions of new streams; with `forget` the state is dropped between them."""
    first, second = streams(512, torch.Generator().manual_seed(2)).split(SEGMENT, 1)
    before = model(first)
    after = model(second, None if forget else before.state)

    def loss(outputs: Tensor, tokens: Tensor) -> float:
        return F.cross_entropy(outputs[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item()

    return loss(before.outputs, first), loss(after.outputs, second)


@pytest.fixture(scope="module")
def remembering() -> nn.Module:
    return trained({"name": "grc_stream", "length": SEGMENT, "ratio": 1.0})


def test_with_the_cache_repetitions_are_recalled_and_first_segments_are_not_foreseen(remembering: nn.Module) -> None:
    first, repeated = losses(remembering)
    assert repeated < 0.25 * CHANCE
    assert first > CHANCE - 0.02, f"{first} on random tokens: the model sees the future"


def test_it_is_the_state_that_remembers(remembering: nn.Module) -> None:
    _, repeated = losses(remembering, forget=True)
    assert repeated > CHANCE - 0.02


def test_without_a_memory_nothing_is_recalled() -> None:
    first, repeated = losses(trained(None))
    assert min(first, repeated) > CHANCE - 0.02
    assert max(first, repeated) < CHANCE + 0.2  # it has learnt the little there is: all tokens are equally likely
