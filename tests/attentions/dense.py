"""Slow twin of mechanisms with one softmax over a pattern of keys: a rule for single pairs, and every exponential
written out."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from attentions.agreement import agree, in_order, inputs
from torch import Tensor

from cached_transformers.attentions import Attention

Rule = Callable[[int, int, int], bool]
"""Whether head h's query i sees key j: rule(h, i, j)."""


def mask_of(rule: Rule, heads: int, tokens: int) -> Tensor:
    """(H, N, N), asked pair by pair."""
    places = range(tokens)
    return torch.tensor([[[bool(rule(h, i, j)) for j in places] for i in places] for h in range(heads)])


def without_padding(mask: Tensor, padding: Tensor | None) -> Tensor:
    """The mask (H, N, N) of places for rows with padding, (B, H, N, N): places are counted without it."""
    if padding is None:
        return mask
    place = padding.long().argsort(dim=1, stable=True).argsort(1)
    return torch.stack([mask[:, p][:, :, p] for p in place]) & ~padding[:, None, None]


def padding_last(twin: Callable[..., Tensor], sources: Iterable[Tensor], padding: Tensor | None) -> Tensor:
    """The result of a twin for rows whose padding is moved after their tokens, in the rows' own order."""
    if padding is None:
        return twin(*sources, None)
    order = padding.long().argsort(dim=1, stable=True)
    out = twin(*(in_order(t, order) for t in sources), in_order(padding, order))
    return in_order(out, order.argsort(1))


def softmax_over(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, padding: Tensor | None = None) -> Tensor:
    """Softmax over the visible keys; 0 where there is none."""
    mask = without_padding(mask, padding)
    weights = (q @ k.mT / q.shape[-1] ** 0.5).exp() * mask
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / torch.where(total > 0, total, 1), 0) @ v


def paddings(tokens: int) -> Iterable[Tensor | None]:
    """None, and a mask that differs from row to row."""
    yield None
    if tokens > 2:
        padding = torch.zeros(2, tokens, dtype=torch.bool)
        padding[0, tokens - 2 :] = True
        padding[1, 1] = True
        yield padding


def assert_is_pattern(core: Attention, rule: Callable[[bool], Rule], lengths: Iterable[int], heads: int = 2) -> None:
    """The core against the rule for its causal and its other form: values, gradients, log-sum-exp, with padding."""
    for tokens in lengths:
        for causal in (False, True):
            of_places = mask_of(rule(causal), heads, tokens)
            for padding in paddings(tokens):
                sources = inputs(tokens, heads=heads)
                mask = of_places if padding is None else of_places & ~padding[:, None, None]
                if not getattr(core, "on_map", False):
                    mask = without_padding(of_places, padding)
                for want_lse in (False, True):
                    want = softmax_over(*sources, mask)
                    got = core(*sources, causal=causal, key_padding_mask=padding, want_lse=want_lse)
                    agree(got.out_BHNV, want, sources)
                q, k, _ = sources
                logits = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
                lse = logits.logsumexp(-1).clamp(min=torch.finfo(torch.double).min)
                torch.testing.assert_close(got.lse_BHN, lse, rtol=1e-12, atol=1e-10)
