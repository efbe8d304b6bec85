"""Comparison of a mechanism with a slow twin: values and all gradients, in float64."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def inputs(
    tokens: int, keys: int | None = None, *, rows: int = 2, heads: int = 2, width: int = 6, values: int = 5
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of float64 that want a gradient; values are narrower than keys."""
    sizes = ((tokens, width), (keys or tokens, width), (keys or tokens, values))
    q, k, v = (torch.randn(rows, heads, *size, dtype=torch.double).requires_grad_() for size in sizes)
    return q, k, v


def agree(
    got: Tensor, want: Tensor, sources: Iterable[Tensor], *, weight: Tensor | None = None, atol: float = 1e-10
) -> None:
    """The same values and gradients of a random sum of them; with a weight, of those where it is not 0."""
    sources = list(sources)
    weight = torch.ones_like(want) if weight is None else weight.expand_as(want)
    torch.testing.assert_close(got * weight, want * weight, rtol=0, atol=atol)
    weight = weight * torch.randn_like(want)
    nothing = sum(0 * source.sum() for source in sources)  # a constant result has a gradient, too: 0
    totals = [(out * weight).sum() + nothing for out in (got, want)]
    ours, theirs = (torch.autograd.grad(total, sources, retain_graph=True) for total in totals)
    for source, a, b in zip(sources, ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol, msg=lambda m, s=source: f"{tuple(s.shape)}: {m}")


def tail(rows: int, tokens: int, share: float = 0.3) -> Tensor:
    """Padding at the end of the first row, and one hole in the middle of the last."""
    padding = torch.zeros(rows, tokens, dtype=torch.bool)
    padding[0, tokens - int(tokens * share) :] = True
    if tokens > 2:
        padding[-1, tokens // 2] = True
    return padding
