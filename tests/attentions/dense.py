"""Slow twin of mechanisms with one softmax over a pattern of keys: a rule for single pairs, and every exponential
written out."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from cached_transformers.attentions import Attention

Rule = Callable[[int, int, int], bool]
"""Whether head h's query i sees key j: rule(h, i, j)."""


def mask_of(rule: Rule, heads: int, tokens: int) -> Tensor:
    """(H, N, N), asked pair by pair."""
    places = range(tokens)
    return torch.tensor([[[bool(rule(h, i, j)) for j in places] for i in places] for h in range(heads)])


def softmax_over(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, padding: Tensor | None = None) -> Tensor:
    """Softmax over the visible keys; 0 where there is none."""
    if padding is not None:
        mask = mask & ~padding[:, None, None]
    weights = (q @ k.mT / q.shape[-1] ** 0.5).exp() * mask
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / torch.where(total > 0, total, 1), 0) @ v


def draw(tokens: int, *, rows: int = 2, heads: int = 2, width: int = 6, value: int = 5, seed: int = 0) -> list[Tensor]:
    """q, k, v (values narrower than keys) with gradients, float64."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, heads, tokens, size) for size in (width, width, value)]
    return [torch.randn(shape, dtype=torch.double, generator=generator).requires_grad_() for shape in shapes]


def paddings(tokens: int) -> Iterable[Tensor | None]:
    """None, and a mask that differs from row to row."""
    yield None
    if tokens > 2:
        padding = torch.zeros(2, tokens, dtype=torch.bool)
        padding[0, tokens - 2 :] = True
        padding[1, 1] = True
        yield padding


def assert_same(got: Tensor, want: Tensor, sources: list[Tensor], atol: float = 1e-10) -> None:
    """Values, and gradients of a random weighting of them."""
    torch.testing.assert_close(got, want, rtol=0, atol=atol)
    weight = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(7))
    for a, b in zip(*(torch.autograd.grad((t * weight).sum(), sources) for t in (got, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


def assert_is_pattern(core: Attention, rule: Callable[[bool], Rule], lengths: Iterable[int], heads: int = 2) -> None:
    """The core against the rule for its causal and its other form: values, gradients, log-sum-exp, with padding."""
    for tokens in lengths:
        for causal in (False, True):
            mask = mask_of(rule(causal), heads, tokens)
            for padding in paddings(tokens):
                sources = draw(tokens, heads=heads)
                for want_lse in (False, True):
                    want = softmax_over(*sources, mask, padding)
                    got = core(*sources, causal=causal, key_padding_mask=padding, want_lse=want_lse)
                    assert_same(got.out_BHNV, want, sources)
                seen = mask if padding is None else mask & ~padding[:, None, None]
                q, k, _ = sources
                logits = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
                lse = logits.logsumexp(-1).clamp(min=torch.finfo(torch.double).min)
                torch.testing.assert_close(got.lse_BHN, lse, rtol=1e-12, atol=1e-10)
