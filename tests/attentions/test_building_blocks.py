"""Building blocks against loops over single tokens, values and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cached_transformers.attentions.parts import building_blocks as blocks

LOWEST = torch.finfo(torch.double).min


def formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax attention that writes every exponential out."""
    weights = (q @ k.mT / math.sqrt(q.shape[-1])).exp() * mask
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total.clamp(min=1e-300), 0) @ v, total[..., 0].log()


@pytest.mark.parametrize("want_lse", [False, True])
@pytest.mark.parametrize("shape", [(3, 5), (2, 2, 3, 5), (1, 2, 3, 1, 5), (1, 1, 3, 4, 5)])
def test_attention_over_any_leading_dimensions(shape: tuple[int, ...], want_lse: bool) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 2, 3, 4, 6, dtype=torch.double, requires_grad=True)
    k = torch.randn(2, 2, 3, 5, 6, dtype=torch.double, requires_grad=True)
    v = torch.randn(2, 2, 3, 5, 7, dtype=torch.double, requires_grad=True)
    if len(shape) == 4:
        q, k, v = q[:, :, 0], k[:, :, 0], v[:, :, 0]
        shape = (*shape[:2], 4, 5) if shape == (2, 2, 3, 5) else (1, 1, 4, 5)
    elif len(shape) == 2:
        shape = (4, 5)
    mask = torch.rand(shape) < 0.5
    mask[..., :1, :] = False
    out, lse = blocks.attend(q, k, v, mask, want_lse=want_lse)
    want, want_lse_values = formula(q, k, v, mask)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    weight = torch.randn_like(out)
    for a, b in zip(*(torch.autograd.grad((o * weight).sum(), (q, k, v)) for o in (out, want)), strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert (lse is not None) == want_lse
    if lse is not None:
        seen = mask.any(-1).expand(lse.shape)
        torch.testing.assert_close(lse[seen], want_lse_values[seen], rtol=0, atol=1e-12)
        assert (lse[~seen] == LOWEST).all()


def test_two_parts_of_the_keys_make_one_softmax() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 7, 6, dtype=torch.double)
    mask = torch.rand(7, 7) < 0.4
    mask[2] = False
    first = torch.arange(7) < 3
    whole, lse = blocks.attend(q, k, v, mask, want_lse=True)
    parts = [blocks.attend(q, k, v, mask & part, want_lse=True) for part in (first, ~first)]
    out, merged = blocks.merge(*parts[0], *parts[1])  # type: ignore[arg-type]
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-12)
    assert lse is not None
    some = mask.any(-1)
    torch.testing.assert_close(merged[:, :, some], lse[:, :, some], rtol=0, atol=1e-12)


@pytest.mark.parametrize("tokens", [1, 4, 7, 12])
@pytest.mark.parametrize(("before", "after"), [(0, 0), (1, 0), (1, 1), (2, 1)])
def test_blocks_and_their_neighbours(tokens: int, before: int, after: int) -> None:
    size = 4
    t = torch.arange(1.0, tokens + 1)[None, None, :, None]
    cut = blocks.into_blocks(t, size)
    assert torch.equal(blocks.out_of_blocks(cut, tokens), t)
    wide = blocks.with_neighbours(cut, before, after)[0, 0, ..., 0]
    query, key = blocks.block_places(cut.shape[2], size, before, after, t.device)
    assert query.flatten().tolist() == list(range(cut.shape[2] * size))
    padding = torch.zeros(2, tokens, dtype=torch.bool)
    padding[1, tokens // 2] = True
    inside = blocks.seen_places(key, tokens, None)
    padded = blocks.seen_places(key, tokens, padding)
    for block in range(cut.shape[2]):
        for slot in range(wide.shape[1]):
            place = (block - before) * size + slot
            assert key[block, 0, slot] == place
            there = 0 <= place < tokens
            assert wide[block, slot] == (place + 1 if there else 0)
            assert inside[block, 0, slot] == there
            assert padded[:, 0, block, 0, slot].tolist() == [there, there and place != tokens // 2]


def test_tables_of_blocks_and_of_keys() -> None:
    t = torch.randn(2, 3, 5, 4, 6)  # B, H, Q, W, E
    table = torch.randint(0, 5, (3, 2, 3))
    got = blocks.gather_blocks(t, table)
    for head in range(3):
        for query in range(2):
            want = torch.cat([t[:, head, index] for index in table[head, query].tolist()], 1)
            assert torch.equal(got[:, head, query], want)
    assert torch.equal(
        blocks.gather_blocks(t, table[:1])[:, 2], blocks.gather_blocks(t, table[:1].expand(3, 2, 3))[:, 2]
    )
    keys = torch.randn(2, 3, 9, 6)
    for index in (torch.randint(0, 9, (7, 2)), torch.randint(0, 9, (3, 7, 2)), torch.randint(0, 9, (2, 3, 7, 2))):
        picked, each = blocks.gather_keys(keys, index), index.expand(2, 3, 7, 2)
        for b in range(2):
            for h in range(3):
                assert torch.equal(picked[b, h], keys[b, h][each[b, h]])


@pytest.mark.parametrize("count", [1, 3, 7, 20, 30])
@pytest.mark.parametrize("kinds", [1, 2, 5, 1000])
def test_of_equal_numbers_the_first_are_the_largest(count: int, kinds: int) -> None:
    t = torch.randint(kinds, (3, 2, 30), generator=torch.Generator().manual_seed(count)).double()
    t[0, 0, ::2] = -torch.inf
    want = t.argsort(dim=-1, descending=True, stable=True)[..., :count]
    assert torch.equal(blocks.largest(t, count), want)


def test_whole_rows_are_picked() -> None:
    torch.manual_seed(0)
    t = torch.randn(2, 3, 5, 4, dtype=torch.double, requires_grad=True)
    index = torch.randint(5, (2, 3, 2, 6))
    got, numbers = blocks.pick_rows(t, index), blocks.pick_rows(t[..., 0], index[:, :, 0])
    want = torch.stack([torch.stack([t[b, h, index[b, h]] for h in range(3)]) for b in range(2)])
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    torch.testing.assert_close(numbers, want[:, :, 0, :, 0], rtol=0, atol=0)
    weight = torch.randn_like(want)
    for a, b in zip(*(torch.autograd.grad((o * weight).sum(), t) for o in (got, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
