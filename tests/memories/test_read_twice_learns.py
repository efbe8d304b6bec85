"""Proof that ReadTwice reads twice: a question in the first block of a document, its answer in the last.

Only a second read that sees later blocks can answer; everything else can but guess.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from memories.learning import accuracy, trained

from cached_transformers.probes.tasks import IGNORED, Episode, ProbeTask

DOCUMENT: dict[str, Any] = {"scope": "document"}
STEPS = 500
VALUES, ASK, FILLER = 8, 8, 10  # tokens: 8 values, "which is first?" and "which is second?", filler


class Questions(ProbeTask):
    """Three blocks of three: [filler, filler, question], [value, filler, value], [value, filler, value]."""

    segment, vocabulary, chance = 3, 11, 1 / VALUES

    def draw(self, rows: int, distance: int, generator: torch.Generator) -> Episode:
        inputs_BN = torch.full((rows, self.segments(distance) * self.segment), FILLER)
        inputs_BN[:, [3, 5, 6, 8]] = torch.randint(0, VALUES, (rows, 4), generator=generator)
        which = torch.randint(0, 2, (rows,), generator=generator)
        inputs_BN[:, 2] = ASK + which
        targets_BN = torch.full_like(inputs_BN, IGNORED)
        targets_BN[:, 2] = inputs_BN.gather(1, 6 + 2 * which[:, None])[:, 0]
        return Episode(inputs_BN, targets_BN)


def answered(memory: dict[str, Any] | None, passes: int) -> float:
    """Share of right answers on new documents, after training."""
    task = Questions()
    spec = None if memory is None else {"name": "read_twice", "slots": 4, "summary": "ends", "clip": 2, **memory}
    sizes = {"heads": 2, "batch_size": 32, "learning_rate": 5e-3, "model": {"tied": False}}
    return accuracy(trained(task, spec, STEPS, distance=2, passes=passes, **sizes), task, 2, passes=passes)


def test_a_question_is_answered_from_the_last_block() -> None:
    assert answered(DOCUMENT, passes=2) > 0.95


@pytest.mark.parametrize(("memory", "passes"), [(None, 1), (DOCUMENT, 1), ({"scope": "earlier"}, 2)])
def test_without_a_second_read_of_later_blocks_it_is_guessed(memory: dict[str, Any] | None, passes: int) -> None:
    assert answered(memory, passes) < 1 / VALUES + 0.05
