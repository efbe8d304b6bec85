"""The smallest task that needs a memory: a symbol is hidden in the first segment and asked for at the end of the last.

Legend: B rows, N tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cached_transformers.models import create_model
from cached_transformers.training.segments import SegmentLoop

SEGMENT, SEGMENTS, CLASSES = 4, 4, 4


def streams(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """One of four symbols somewhere in the first of four segments of noise; it is asked for at the very end."""
    tokens = torch.randint(CLASSES, CLASSES + 4, (rows, SEGMENTS * SEGMENT), generator=generator)
    symbol = torch.randint(0, CLASSES, (rows, 1), generator=generator)
    tokens.scatter_(1, torch.randint(0, SEGMENT, (rows, 1), generator=generator), symbol)
    tokens[:, -1] = CLASSES + 4
    targets = torch.full_like(tokens, -100)
    targets[:, -1:] = symbol
    return tokens, targets


def model(memory: str | None, **options: Any) -> Any:
    """A language model of one layer, in which only a memory reaches the first segment."""
    torch.manual_seed(0)
    spec = None if memory is None else {"name": memory, **options}
    sizes = {"vocabulary": CLASSES + 7, "width": 32, "depth": 1, "heads": 4, "feed_forward": 64}
    return create_model("language_model", **sizes, memory=spec)


def accuracy(model: Any, steps: int) -> float:
    """Share of symbols recalled in new streams after so many training steps; chance is a quarter."""
    loop, optimizer = SegmentLoop(model, SEGMENT, bptt=SEGMENTS), torch.optim.AdamW(model.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        loop(*streams(64, generator))[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    tokens, targets = streams(1000, torch.Generator().manual_seed(2))
    state = None
    with torch.no_grad():
        for segment in tokens.split(SEGMENT, 1):
            out = model.eval()(segment, state)
            state = out.state
    return (out.outputs[:, -1].argmax(-1) == targets[:, -1]).float().mean().item()
