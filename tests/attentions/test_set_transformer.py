"""Set Transformer against the authors' equations, written out head by head and member by member."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attentions.agreement import agree, inputs, tail
from torch import Tensor

from cached_lab.experiments.costs.flops import count_flops
from cached_transformers.attentions import create_attention
from cached_transformers.attentions.set_transformer import ISAB, MAB, PMA, SAB, InducedAttention
from cached_transformers.interfaces.memory import Context


def average(query: Tensor, keys: list[Tensor], values: list[Tensor], root: float) -> Tensor:
    """Softmax-weighted mean of the values; 0 of none."""
    if not keys:
        return 0 * query.sum() * torch.ones(5, dtype=query.dtype)
    weights = torch.stack([(query @ key / root).exp() for key in keys])
    return sum((w * value for w, value in zip(weights / weights.sum(), values, strict=True)), torch.zeros(()))


def make(**options: Any) -> InducedAttention:
    core = create_attention({"name": "set_transformer", "points": 3, **options}, width=12, heads=2).double().eval()
    assert isinstance(core, InducedAttention)
    return core


def twin(core: InducedAttention, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None) -> Tensor:
    root, rows = math.sqrt(q.shape[-1]), []
    for b in range(len(q)):
        there = [j for j in range(k.shape[2]) if padding is None or not padding[b, j]]
        for h in range(q.shape[1]):
            keys, values = [k[b, h, j] for j in there], [v[b, h, j] for j in there]
            told = [average(point, keys, values, root) for point in core.points_HPE[h]]
            shown = list(core.keys_HPE[h])
            if core.induced_keys and keys:
                shown = [s + average(p, keys, keys, root) for s, p in zip(shown, core.points_HPE[h], strict=True)]
            rows += [average(query, shown, told, root) for query in q[b, h]]
    return torch.stack(rows).view(*q.shape[:3], -1)


@pytest.mark.parametrize("induced_keys", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_loops_over_points_and_members_give_the_same(induced_keys: bool, padded: bool) -> None:
    core = make(induced_keys=induced_keys)
    for queries, keys in ((1, 1), (2, 2), (9, 9), (4, 7)):
        q, k, v = inputs(queries, keys)
        padding = tail(2, keys) if padded else None
        if padding is not None and keys == 9:
            padding[0] = True
        got = core(q, k, v, key_padding_mask=padding).out_BHNV
        agree(got, twin(core, q, k, v, padding), [q, k, v, *core.parameters()])


def test_keys_of_a_memory_are_members_of_the_set() -> None:
    core = make(induced_keys=True)
    q, k, v = inputs(7)
    slots = torch.randn(2, 2, 4, 6).double(), torch.randn(2, 2, 4, 5).double()
    context = Context(*slots, torch.zeros(2, 4, 1), torch.tensor([[True] * 3 + [False], [False] * 4]))
    padding = tail(2, 7)
    got = core(q, k, v, context=context, key_padding_mask=padding).out_BHNV
    both = torch.cat([~context.valid_BM, padding], 1)
    want = core(q, *(torch.cat(pair, 2) for pair in zip(slots, (k, v), strict=True)), key_padding_mask=both).out_BHNV
    agree(got, want, [q, k, v])


def mab(block: MAB, x: Tensor, y: Tensor) -> Tensor:
    """The block for one set, head by head."""
    q, k, v = (f.weight for f in (block.query, block.key, block.value))
    q, k, v = x @ q.T + block.query.bias, y @ k.T + block.key.bias, y @ v.T + block.value.bias
    size, heads = q.shape[-1] // block.heads, []
    for h in range(block.heads):
        own = slice(h * size, (h + 1) * size)
        keys, values = list(k[:, own]), list(v[:, own])
        heads.append(torch.stack([row + average(row, keys, values, math.sqrt(q.shape[-1])) for row in q[:, own]]))
    o = block.norms[0](torch.cat(heads, -1))
    out: Tensor = block.norms[1](o + (o @ block.output.weight.T + block.output.bias).clamp(min=0))
    return out


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("members", [1, 5])
def test_the_blocks_are_those_of_the_authors(norm: bool, members: int) -> None:
    x = torch.randn(2, members, 4, dtype=torch.double, requires_grad=True)
    z = torch.randn(2, members, 6, dtype=torch.double, requires_grad=True)
    padding = tail(2, members)
    sets: list[Tensor] = [row[~gone] for row, gone in zip(x, padding, strict=True)]
    fine: list[Tensor] = [row[~gone] for row, gone in zip(z, padding, strict=True)]
    sab, isab = SAB(4, 6, 2, norm=norm).double(), ISAB(4, 6, 2, 3, norm=norm).double()
    pma = PMA(6, 2, 2, feed_forward=norm, norm=norm).double()
    for got, want in (
        (sab(x, padding), [mab(sab.block, s, s) for s in sets]),
        (isab(x, padding), [mab(isab.outer, s, mab(isab.inner, isab.points_1PD[0], s)) for s in sets]),
    ):
        kept = [row[~gone] for row, gone in zip(got, padding, strict=True)]
        agree(torch.cat(kept), torch.cat(want), [x])
    pooled = torch.stack([mab(pma.block, pma.seeds_1PD[0], pma.feed_forward(s)) for s in fine])
    agree(pma(z, padding), pooled, [z, *pma.parameters()])
    whole = torch.stack([mab(isab.outer, s, mab(isab.inner, isab.points_1PD[0], s)) for s in x])
    agree(isab(x), whole, [x, *isab.parameters()])


def test_blocks_know_no_order_and_an_empty_row_is_finite() -> None:
    x, order = torch.randn(2, 9, 6).double(), torch.randperm(9)
    for block in (SAB(6, 6, 2).double(), ISAB(6, 6, 2, 3).double()):
        torch.testing.assert_close(block(x[:, order]), block(x)[:, order])
    pool = PMA(6, 2, 3).double()
    torch.testing.assert_close(pool(x[:, order]), pool(x))
    assert pool(x).shape == (2, 3, 6)
    core, (q, k, v) = make(), inputs(9)
    torch.testing.assert_close(core(q, k[:, :, order], v[:, :, order]).out_BHNV, core(q, k, v).out_BHNV)
    x, padding = torch.randn(2, 5, 6), torch.ones(2, 5, dtype=torch.bool)
    for block in (SAB(6, 6, 2), ISAB(6, 6, 2, 3), PMA(6, 2)):
        out = block(x, padding)
        out.sum().backward()
        assert out.isfinite().all() and all(p.grad is None or p.grad.isfinite().all() for p in block.parameters())


def test_cost_of_the_blocks() -> None:
    def block_cost(n: int, m: int, a: int, c: int, rows_of_x: int = 2) -> int:
        return 2 * (6 * rows_of_x * n * a + 2 * 6 * (2 * m * c + n * 6 + 2 * n * m))

    x, z = torch.randn(2, 9, 4), torch.randn(2, 9, 6)
    assert count_flops(SAB(4, 6, 2), x) == block_cost(9, 9, 4, 4)
    # The points are projected once, for all rows.
    assert count_flops(ISAB(4, 6, 2, 3), x) == block_cost(3, 9, 6, 4, 1) + block_cost(9, 3, 4, 6)
    assert count_flops(PMA(6, 2, 3), z) == block_cost(3, 9, 6, 6, 1)
