"""A window over a growing buffer, against a store that is copied at every token.

Legend: B rows, H heads, E head width, M slots, N tokens, G tensors of a row.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cached_transformers.memories.parts.sliding import Window

B, H, E, M, N, G = 2, 3, 4, 3, 7, 4


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def attend(k: Tensor, v: Tensor, q: Tensor, bias: Tensor, valid_BM: Tensor) -> Tensor:
    logits = (q @ k.mT / math.sqrt(E) + bias).masked_fill(~valid_BM[:, None, None], -torch.inf)
    return logits.softmax(-1).masked_fill(~valid_BM[:, None, None], 0).nan_to_num(0) @ v


@pytest.mark.parametrize("by_attention", [True, False])
def test_windows_and_their_gradients_are_those_of_copies(by_attention: bool) -> None:
    """Each row is made of what the one before was read for; a row without a valid slot is among them."""
    torch.manual_seed(0)
    store, q = [numbers(B, H, M, E) for _ in range(G)], numbers(N, B, H, 1, E)
    bias, first = numbers(B, H, 1, M), numbers(G, B, H, 1, E)
    valid = torch.ones(N, B, M, dtype=torch.bool)
    valid[0, 0], valid[1, 0, :2] = False, False

    def outputs(window: Window | None) -> list[Tensor]:
        pairs, rows, outs = list(store), list(first.unbind(0)), []
        for i in range(N):
            seen = pairs if window is None else window.seen
            ways = None if window is None or not by_attention else window.attends(valid[i])
            read = [
                attend(seen[s], seen[s + 1], q[i] + s, bias, valid[i]) if ways is None else ways[s // 2](q[i] + s, bias)
                for s in range(0, G, 2)
            ]
            outs.append(torch.stack([*read, *(t[:, :, :1] * t[:, :, -1:] for t in seen)]))
            rows = [row + read[g // 2].sin() for g, row in enumerate(rows)]
            if window is None:
                pairs = [torch.cat([t[:, :, 1:], row], 2) for t, row in zip(pairs, rows, strict=True)]
            else:
                window.slide(rows)
        return outs

    leaves = [*store, q, bias, first]
    want = outputs(None)
    for some in (slice(None), slice(3, 4)):  # the loss of all tokens, and of one in the middle
        loss = sum(o.cos().sum() for o in want[some])
        expected = torch.autograd.grad(loss, leaves, retain_graph=True)
        got = outputs(Window(store, N))
        torch.testing.assert_close(got, want)
        mine = sum(o.cos().sum() for o in got[some])
        for _ in range(2):  # nothing of the first backward is in the second
            grads = torch.autograd.grad(mine, leaves, retain_graph=True)
            torch.testing.assert_close(grads, expected, rtol=0, atol=1e-12)
