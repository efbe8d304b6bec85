"""A language model beside the same one with a slow twin in the place of its memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cached_transformers import state as states


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
