"""Proof that ReadTwice reads twice: a question in the first block of a document, its answer in the last.

Only a second read that sees later blocks can answer; everything else can but guess.
"""

from __future__ import annotations

from typing import Any

import torch
from memories.learning import accuracy, trained, untrained

from cached_lab.experiments.probes.tasks import IGNORED, Episode, ProbeTask
from cached_transformers.loops.segments import SegmentLoop

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


TASK = Questions()
SIZES: dict[str, Any] = {"heads": 2, "batch_size": 32, "learning_rate": 5e-3, "model": {"tied": False}}


def reader(memory: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if memory is None else {"name": "read_twice", "slots": 4, "summary": "ends", "clip": 2, **memory}


def answered(memory: dict[str, Any] | None, passes: int, steps: int = STEPS) -> float:
    """Share of right answers on new documents, after training."""
    model = trained(TASK, reader(memory), steps, distance=2, passes=passes, **SIZES)
    return accuracy(model, TASK, 2, passes=passes)


@torch.no_grad()
def heard(memory: dict[str, Any] | None, passes: int) -> float:
    """How much the answer in the first block changes with the values in the others, for random weights."""
    model = untrained(TASK, reader(memory), **SIZES).eval()
    for parameter in model.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    inputs_BN, targets_BN = TASK.draw(100, 2, torch.Generator().manual_seed(0))
    other_BN = torch.where(inputs_BN < VALUES, (inputs_BN + 1) % VALUES, inputs_BN)
    answers = []
    for tokens_BN in (inputs_BN, other_BN):
        state = SegmentLoop(model, TASK.segment, 3, passes).earlier_passes(tokens_BN, targets_BN)
        answers.append(model(tokens_BN[:, : TASK.segment], state).outputs[:, -1])
    return (answers[0] - answers[1]).abs().max().item()


def test_a_question_is_answered_from_the_last_block() -> None:
    assert answered(DOCUMENT, passes=2) > 0.95


def test_the_task_cannot_be_solved_without_a_memory() -> None:
    assert answered(None, 1, steps=200) < 1 / VALUES + 0.05


def test_without_a_second_read_of_later_blocks_nothing_is_heard_of_them() -> None:
    assert heard(DOCUMENT, 2) > 0.01
    assert heard(None, 1) == heard(DOCUMENT, 1) == heard({"scope": "earlier"}, 2) == 0
