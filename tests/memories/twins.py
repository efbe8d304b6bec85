"""A language model beside the same one with a slow twin in the place of its memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cached_transformers import state as states

VOCABULARY, SEGMENT, ROWS = 11, 5, 3


def segments(count: int) -> tuple[Tensor, ...]:
    """Token ids (ROWS, SEGMENT) of so many segments."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, VOCABULARY, (ROWS, count * SEGMENT), generator=generator).split(SEGMENT, 1)


def paddings(count: int) -> list[Tensor]:
    """Behind, in front and in the middle of rows; a row that begins late, one that pauses; none."""
    padding = torch.zeros(count, ROWS, SEGMENT, dtype=torch.bool)
    padding[0, 0, 3:], padding[0, 1, :2], padding[0, 2] = True, True, True
    padding[1, 0, 1:3], padding[1, 1] = True, True
    return list(padding)


def same_as_twin(
    model: nn.Module, twin: nn.Module, segments: Sequence[Tensor], paddings: Sequence[Tensor | None]
) -> None:
    """Results, states and gradients of both over some segments; padding shows nothing.

    The twin holds the memory whose parameters it uses as `fast`. Every parameter has to have a gradient.
    """
    gradients, results = [], []
    for one in (model, twin):
        state, total, outs = None, 0.0, []
        for ids, hidden in zip(segments, paddings, strict=True):
            out = one(ids, state, padding=hidden)
            state = out.state
            shown = out.outputs if hidden is None else out.outputs.masked_fill(hidden[..., None], 0)
            outs.append(shown)
            total = total + (shown * torch.linspace(-1, 1, shown.numel(), dtype=shown.dtype).view_as(shown)).sum()
        total.backward()  # type: ignore[union-attr]
        gradients.append({k.replace(".fast.", "."): p.grad for k, p in one.named_parameters() if p.grad is not None})
        results.append([*outs, *(t for _, t in states.named_tensors(state))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
    assert gradients[0].keys() == gradients[1].keys() == dict(model.named_parameters()).keys()
    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-6, atol=1e-7, msg=name)
