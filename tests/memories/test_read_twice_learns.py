"""Proof that ReadTwice reads twice: a question in the first block of a document, its answer in the last.

Only a second read that sees later blocks can answer; everything else can but guess.

Legend: B rows, N tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cached_transformers.models import create_model
from cached_transformers.training.segments import SegmentLoop

DOCUMENT: dict[str, Any] = {"scope": "document"}
STEPS = 500
VALUES, ASK, FILLER = 8, 8, 10  # tokens: 8 values, "which is first?" and "which is second?", filler


def questions(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Three blocks of three: [filler, filler, question], [value, filler, value], [value, filler, value]."""
    inputs = torch.full((rows, 9), FILLER)
    inputs[:, [3, 5, 6, 8]] = torch.randint(0, VALUES, (rows, 4), generator=generator)
    which = torch.randint(0, 2, (rows,), generator=generator)
    inputs[:, 2] = ASK + which
    targets = torch.full_like(inputs, -100)
    targets[:, 2] = inputs.gather(1, 6 + 2 * which[:, None])[:, 0]
    return inputs, targets


def answered(memory: dict[str, Any] | None, passes: int) -> float:
    """Share of right answers on new documents, after training."""
    torch.manual_seed(0)
    spec = None if memory is None else {"name": "read_twice", "slots": 4, "summary": "ends", "clip": 2, **memory}
    model = create_model(
        "language_model", vocabulary=11, width=32, depth=1, heads=2, feed_forward=64, memory=spec, tied=False
    )
    loop = SegmentLoop(model, 3, bptt=3, passes=passes)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loop(*questions(32, generator))[0].backward()
        optimizer.step()
    inputs, targets = questions(1000, torch.Generator().manual_seed(2))
    with torch.no_grad():
        said: list[Tensor] = []
        model.head.register_forward_hook(lambda _m, _i, y: said.append(y))
        loop.eval()(inputs, targets)
        answers = said[-3][:, 2].argmax(-1)  # the first block of the last pass
    return (answers == targets[:, 2]).double().mean().item()


def test_a_question_is_answered_from_the_last_block() -> None:
    assert answered(DOCUMENT, passes=2) > 0.95


@pytest.mark.parametrize(("memory", "passes"), [(None, 1), (DOCUMENT, 1), ({"scope": "earlier"}, 2)])
def test_without_a_second_read_of_later_blocks_it_is_guessed(memory: dict[str, Any] | None, passes: int) -> None:
    assert answered(memory, passes) < 1 / VALUES + 0.05
