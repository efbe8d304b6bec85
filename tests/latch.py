"""A task that only a carried memory solves: a symbol in the first segment is asked for at the end of the last.

Segments are so short, and so many, that attention within one never sees symbol and question together.

Legend: B rows, N tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers.models import create_model
from cached_transformers.state import reorder
from cached_transformers.training.segments import SegmentLoop

CLASSES, SEGMENT, SEGMENTS = 4, 4, 4
QUERY, VOCABULARY = 2 * CLASSES, 2 * CLASSES + 1


def latch(rows: int, generator: torch.Generator, segments: int = SEGMENTS) -> tuple[Tensor, Tensor]:
    """Inputs and targets (rows, segments * SEGMENT): noise, a symbol in the first segment, the question at the end."""
    inputs = torch.randint(CLASSES, 2 * CLASSES, (rows, segments * SEGMENT), generator=generator)
    symbol = torch.randint(0, CLASSES, (rows,), generator=generator)
    place = torch.randint(0, SEGMENT - 1, (rows,), generator=generator)
    inputs[torch.arange(rows), place] = symbol
    inputs[:, -1] = QUERY
    targets = torch.full_like(inputs, -100)
    targets[:, -1] = symbol
    return inputs, targets


def trained(memory: Any, steps: int, **options: Any) -> nn.Module:
    """A model of one layer after `steps` steps over the whole text, the gradient crossing all segments."""
    torch.manual_seed(0)
    sizes = {"vocabulary": VOCABULARY, "width": 32, "depth": 1, "heads": 4, "feed_forward": 64}
    model = create_model("language_model", **{**sizes, **options}, memory=memory)
    run, optimizer = SegmentLoop(model, SEGMENT, SEGMENTS), torch.optim.AdamW(model.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        run(*latch(64, generator))[0].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, *, forget: bool = False, shuffle: bool = False, segments: int = SEGMENTS) -> float:
    """Share of new questions answered; `forget` drops the state before the last segment, `shuffle` hands it to the
    next row."""
    inputs, targets = latch(512, torch.Generator().manual_seed(2), segments)
    *before, last = inputs.split(SEGMENT, 1)
    state: Any = None
    for segment in before:
        state = model(segment, state).state
    if shuffle:
        state = reorder(state, torch.arange(512).roll(1))
    outputs = model(last, None if forget else state).outputs
    return (outputs[:, -1].argmax(-1) == targets[:, -1]).float().mean().item()
