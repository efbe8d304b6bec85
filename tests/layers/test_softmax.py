"""The softmax core against the formula, for every combination of masks, with gradients.

Legend: B rows, H heads, N tokens, M slots, E head width.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from attentions.agreement import agree
from torch import Tensor

from cached_transformers.attentions.softmax import SoftmaxAttention
from cached_transformers.interfaces.memory import Context

B, H, N, M, E = 2, 2, 5, 3, 4


def formula(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, seen_BNL: Tensor) -> Tensor:
    """softmax over what each query sees, spelled out; a query that sees nothing gives zeros."""
    logits = q @ k.mT / math.sqrt(E)
    if bias is not None:
        logits = logits + bias
    weight = torch.where(seen_BNL[:, None], (logits - logits.amax(-1, keepdim=True).detach()).exp(), 0)
    return (weight @ v) / weight.sum(-1, keepdim=True).clamp(min=1e-300)


@pytest.mark.parametrize(("causal", "padded", "context", "biased"), list(itertools.product([False, True], repeat=4)))
def test_values_and_gradients(causal: bool, padded: bool, context: bool, biased: bool) -> None:
    q, k, v = (torch.randn(B, H, N, E, dtype=torch.double, requires_grad=True) for _ in range(3))
    ck, cv = (torch.randn(B, H, M, E, dtype=torch.double, requires_grad=True) for _ in range(2))
    m = M if context else 0
    bias = torch.randn(B, H, N, m + N, dtype=torch.double, requires_grad=True) if biased else None
    # Row 0 begins with padding: with causal and no valid slot its first query sees nothing at all.
    padding = torch.tensor([[True, False, False, True, False], [False, False, False, True, True]]) if padded else None
    valid = torch.tensor([[False, False, False], [True, False, True]])

    seen_BNL = torch.ones(B, N, m + N, dtype=torch.bool)
    for b, i, j in itertools.product(range(B), range(N), range(N)):
        seen_BNL[b, i, m + j] = not (causal and j > i) and not (padding is not None and padding[b, j])
    if context:
        seen_BNL[:, :, :m] = valid[:, None]

    offered = Context(ck, cv, torch.zeros(B, M, 1), valid) if context else None
    got = SoftmaxAttention()(q, k, v, causal=causal, key_padding_mask=padding, context=offered, bias_BHNM=bias).out_BHNV
    keys, values = (torch.cat(pair, 2) if context else pair[1] for pair in ((ck, k), (cv, v)))
    want = formula(q, keys, values, bias, seen_BNL)
    sources = [q, k, v, *([ck, cv] if context else []), *([] if bias is None else [bias])]
    agree(got, want, sources)
    if causal and padded:
        assert (got[0, :, 0] == 0).all()

    seen = {"causal": causal, "key_padding_mask": padding, "context": offered, "bias_BHNM": bias}
    both = SoftmaxAttention()(q, k, v, **seen, want_lse=True)
    torch.testing.assert_close(both.out_BHNV, got, rtol=0, atol=1e-12)
    lse = both.lse_BHN
    logits = q @ keys.mT / math.sqrt(E) + (0 if bias is None else bias)
    logits = logits.masked_fill(~seen_BNL[:, None], -torch.inf)
    some = seen_BNL.any(-1)[:, None].expand(B, H, N)
    assert (lse[~some] < -1e300).all()
    agree(lse[some], logits[some].logsumexp(-1), sources)


def test_a_context_of_one_row_serves_all() -> None:
    q, k, v = torch.randn(3, B, H, N, E, dtype=torch.double)
    one = Context(*torch.randn(2, 1, H, M, E).double(), torch.zeros(1, M, 1), torch.tensor([[True, False, True]]))
    each = Context(*(t.expand(B, *t.shape[1:]) for t in one[:4]))
    core = SoftmaxAttention()
    for causal in (False, True):
        a, b = (core(q, k, v, causal=causal, context=c).out_BHNV for c in (one, each))
        assert torch.equal(a, b)


def test_queries_and_keys_may_differ_in_number() -> None:
    q, k, v = (torch.randn(B, H, n, E, dtype=torch.double) for n in (N, 2, 2))
    want = formula(q, k, v, None, torch.ones(B, N, 2, dtype=torch.bool))
    torch.testing.assert_close(SoftmaxAttention()(q, k, v).out_BHNV, want, rtol=0, atol=1e-10)


def test_dropout_acts_in_training_only() -> None:
    q, k, v = torch.randn(3, B, H, N, E)
    core, plain = SoftmaxAttention(dropout=0.5), SoftmaxAttention()
    assert not torch.allclose(core(q, k, v).out_BHNV, plain(q, k, v).out_BHNV)
    assert torch.equal(core.eval()(q, k, v).out_BHNV, plain(q, k, v).out_BHNV)
