"""The side attention of ReadTwice by itself: the no-op key, empty slots, the best k, tokens in pieces."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from cached_transformers.memories.read_twice import SideAttention

WIDTH, HEADS, ROWS = 8, 2, 2


def side_inputs(top_k: int | None = None, clip: int | None = None) -> tuple[SideAttention, list[Tensor]]:
    side = SideAttention(WIDTH, HEADS, top_k=top_k, clip=clip).double()
    x, slots = torch.randn(ROWS, 5, WIDTH).double(), torch.randn(ROWS, 4, WIDTH).double()
    valid = torch.tensor([[True, True, False, True], [False, False, False, False]])
    return side, [x, slots, valid, torch.arange(4).expand(ROWS, -1)]


def test_what_sees_nothing_reads_exactly_nothing() -> None:
    side, (x, slots, valid, places) = side_inputs(clip=2)
    y = side(x, slots, valid, places)
    assert y[0].abs().min() > 0 and y[1].abs().max() == 0
    nn.init.constant_(side.nothing_HE, 1e4)
    nn.init.constant_(side.query.weight, 0), nn.init.constant_(side.query.bias, 1)
    assert side(x, slots, valid, places).abs().max() == 0  # and so does what prefers the no-op key


def test_empty_slots_may_hold_anything() -> None:
    side, (x, slots, valid, places) = side_inputs(top_k=2, clip=1)
    poisoned = torch.where(valid[..., None], slots, torch.nan).requires_grad_()
    far = torch.where(valid, places, 2**40)
    y = side(x, poisoned, valid, far)
    torch.testing.assert_close(y, side(x, slots, valid, places), rtol=0, atol=1e-12)
    y.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in side.parameters()) and poisoned.grad.isfinite().all()


@pytest.mark.parametrize("top_k", [3, 4, 9])
def test_a_top_k_of_all_that_is_visible_is_none(top_k: int) -> None:
    side, given = side_inputs()
    y = side(*given)
    side.top_k = top_k
    torch.testing.assert_close(side(*given), y, rtol=0, atol=1e-12)
    side.top_k = 2
    assert (side(*given)[0] - y[0]).abs().max() > 1e-3


def test_tokens_may_come_in_two_calls() -> None:
    side, (x, *rest) = side_inputs(clip=1)
    whole = side(x, *rest)
    torch.testing.assert_close(torch.cat([side(part, *rest) for part in x.split(2, 1)], 1), whole, rtol=0, atol=1e-12)
