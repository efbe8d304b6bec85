"""Axial attention against the package axial-attention, which gives each axis projections of its own."""

from __future__ import annotations

import pytest
import torch

from cached_transformers.attentions.axial import AxialAttention

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("size", [(3, 5), (1, 13), (13, 1), (4, 4)])
def test_the_sum_of_both_axes(size: tuple[int, int], common: bool) -> None:
    """With projections of each axis, and with projections in common, which mode="sum" has."""
    package = pytest.importorskip("axial_attention")
    torch.manual_seed(0)
    peer = package.AxialAttention(12, num_dimensions=2, dim_index=-1, heads=2, sum_axial_out=True).double()
    first, second = (axis.fn for axis in peer.axial_attentions)
    if common:
        first.to_out.bias.data.zero_()
        second.load_state_dict(first.state_dict())
    x = torch.randn(2, *size, 12, dtype=torch.double)
    got = torch.zeros_like(x)
    for mode, own in (("sum", first),) if common else (("col", first), ("row", second)):
        made = [own.to_q(x), *own.to_kv(x).chunk(2, -1)]
        sources = [t.flatten(1, 2).unflatten(-1, (2, 6)).transpose(1, 2) for t in made]
        out = AxialAttention(mode=mode, size=size)(*sources).out_BHNV
        got = got + own.to_out(out.transpose(1, 2).flatten(2)).unflatten(1, size)
    torch.testing.assert_close(got, peer(x), rtol=0, atol=1e-12)
