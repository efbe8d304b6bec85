"""Comparison of a mechanism with a slow twin: values and all gradients, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

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
    got: Tensor,
    want: Tensor,
    sources: Iterable[Tensor],
    *,
    weight: Tensor | None = None,
    atol: float = 1e-10,
    where: str = "",
) -> None:
    """The same values and gradients of a random sum of them; with a weight, of those where it is not 0."""
    sources = list(sources)
    weight = torch.ones_like(want) if weight is None else weight.expand_as(want)
    torch.testing.assert_close(got * weight, want * weight, rtol=0, atol=atol, msg=lambda m: f"{where}: {m}")
    weight = weight * torch.randn_like(want)
    nothing = sum(0 * source.sum() for source in sources)  # a constant result has a gradient, too: 0
    totals = [(out * weight).sum() + nothing for out in (got, want)]
    ours, theirs = (torch.autograd.grad(total, sources, retain_graph=True) for total in totals)
    for source, a, b in zip(sources, ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol, msg=lambda m, s=source: f"{where} {tuple(s.shape)}: {m}")


def softmax_of(q_E: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """One query over a list of keys, by the formula."""
    weights = torch.stack([(q_E @ k_E / math.sqrt(len(q_E))).exp() for k_E in keys])
    return (weights[:, None] * torch.stack(values)).sum(0) / weights.sum()


def in_order(t: Tensor, index: Tensor) -> Tensor:
    """Tokens of (B, H, N, E), (B, N) or (B, N, D) in the order of `index` (B, N), where there are as many."""
    dim = 2 if t.dim() == 4 else 1
    if t.shape[dim] != index.shape[1]:
        return t
    return torch.stack([row.index_select(dim - 1, i) for row, i in zip(t, index, strict=True)])


def agree_by_definition(
    core: Callable[..., Any],
    twin: Callable[..., tuple[Tensor, Tensor]],
    given: Mapping[str, Tensor],
    parameters: Iterable[Tensor] = (),
    *,
    lse: bool = True,
    forms: tuple[bool, ...] = (False, True),
) -> None:
    """The core is its twin in values, log-sum-exps and gradients: causal and not, without and with padding.

    Both get `given`; the twin returns values and log-sum-exps, of rows whose padding is moved after their tokens.
    """
    rows, _, count, _ = given["q"].shape
    halves, lowest = torch.zeros(rows, count, dtype=torch.bool), torch.finfo(torch.double).min
    halves[0, count // 2 :] = True
    halves[1, : count // 3] = True
    sources = [*given.values(), *parameters]
    for causal in forms:
        for padding in (None, halves):
            there = torch.ones_like(halves) if padding is None else ~padding
            order = (~there).long().argsort(dim=1, stable=True)
            moved = {name: in_order(t, order) for name, t in given.items()}
            found = twin(moved, causal=causal, padding=None if padding is None else in_order(padding, order))
            want, want_lse = (in_order(t, order.argsort(1)) for t in (found[0], found[1][..., None]))
            want_lse = want_lse[..., 0]
            for asked in {False, lse}:
                got = core(given, causal=causal, key_padding_mask=padding, want_lse=asked)
                agree(got.out_BHNV, want, sources, weight=there[:, None, :, None])
            if lse:
                seen = there[:, None] & (want_lse > lowest)
                agree(got.lse_BHN, want_lse, sources, weight=seen)
                assert (got.lse_BHN[there[:, None] & ~seen] == lowest).all()


def paddings(tokens: int, rows: int = 2) -> list[Tensor]:
    """None, at the end, and anywhere: in front and between, too."""
    none, end = torch.zeros(2, rows, tokens, dtype=torch.bool)
    end[0, tokens - tokens // 3 :] = True
    anywhere = torch.rand(rows, tokens) < 0.4
    anywhere[1, : tokens // 2] = True
    return [none, end, anywhere]


def tail(rows: int, tokens: int, share: float = 0.3) -> Tensor:
    """Padding at the end of the first row, and one hole in the middle of the last."""
    padding = torch.zeros(rows, tokens, dtype=torch.bool)
    padding[0, tokens - int(tokens * share) :] = True
    if tokens > 2:
        padding[-1, tokens // 2] = True
    return padding
