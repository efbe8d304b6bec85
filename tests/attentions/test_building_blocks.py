"""Building blocks: two softmaxes merged, and ties."""

from __future__ import annotations

import pytest
import torch

from cached_transformers.attentions.parts import building_blocks as blocks


def test_two_parts_of_the_keys_make_one_softmax() -> None:
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


@pytest.mark.parametrize("count", [1, 3, 7, 20, 30])
@pytest.mark.parametrize("kinds", [1, 2, 5, 1000])
def test_of_equal_numbers_the_first_are_the_largest(count: int, kinds: int) -> None:
    t = torch.randint(kinds, (3, 2, 30), generator=torch.Generator().manual_seed(count)).double()
    t[0, 0, ::2] = -torch.inf
    want = t.argsort(dim=-1, descending=True, stable=True)[..., :count]
    assert torch.equal(blocks.largest(t, count), want)
