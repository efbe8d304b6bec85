"""Proof that a gated recurrent cache remembers: each stream emits a random segment, and then the same segment again.

Nothing but a memory tells what comes in the second segment; nothing at all tells what comes in the first. Without a
memory no loss below log V is possible on either; with one, a loss below log V on the first would mean that the future
leaked.

Legend: B rows, N tokens.
"""

from __future__ import annotations

import math

import pytest
import torch
from memories.learning import reach, trained
from torch import Tensor, nn
from torch.nn import functional as F

from cached_lab.experiments.probes.tasks import IGNORED, Episode, ProbeTask

VOCABULARY, SEGMENT, STEPS = 8, 8, 400
CHANCE = math.log(VOCABULARY)


class Echo(ProbeTask):
    """A random segment and its repetition; asked is every token but the first of each."""

    segment, vocabulary, chance = SEGMENT, VOCABULARY, 1 / VOCABULARY

    def draw(self, rows: int, distance: int, generator: torch.Generator) -> Episode:
        segment_BN = torch.randint(0, VOCABULARY, (rows, SEGMENT), generator=generator)
        inputs_BN = segment_BN.repeat(1, self.segments(distance))
        targets_BN = inputs_BN.roll(-1, 1)
        targets_BN[:, SEGMENT - 1 :: SEGMENT] = IGNORED
        return Episode(inputs_BN, targets_BN)


SIZES = {"width": 48, "depth": 2, "heads": 2, "feed_forward": 96, "batch_size": 32, "model": {"tied": False}}
MEMORY = {"name": "grc_stream", "length": SEGMENT, "ratio": 1.0}


@torch.no_grad()
def losses(model: nn.Module, forget: bool = False) -> tuple[float, float]:
    """Loss on first segments and on repetitions of new streams; with `forget` the state is dropped between them."""
    first, second = Echo().draw(512, 1, torch.Generator().manual_seed(2)).inputs_BN.split(SEGMENT, 1)
    before = model(first)
    after = model(second, None if forget else before.state)

    def loss(outputs: Tensor, tokens: Tensor) -> float:
        return F.cross_entropy(outputs[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item()

    return loss(before.outputs, first), loss(after.outputs, second)


@pytest.fixture(scope="module")
def remembering() -> nn.Module:
    return trained(Echo(), MEMORY, STEPS, distance=1, check_every=STEPS, **SIZES)


def test_only_the_state_recalls_repetitions(remembering: nn.Module) -> None:
    first, repeated = losses(remembering)
    assert repeated < 0.25 * CHANCE
    assert first > CHANCE - 0.02, f"{first} on random tokens: the model sees the future"
    _, repeated = losses(remembering, forget=True)
    assert repeated > CHANCE - 0.02
    assert reach(Echo(), None, 1, **SIZES) == 0 < reach(Echo(), MEMORY, 1, **SIZES)
