"""Sparse Sinkhorn attention beside sinkhorn-transformer 0.11.4."""

from __future__ import annotations

import pytest
import torch
from attentions.cases import B, E, H
from torch import Tensor

from cached_transformers.attentions.sinkhorn import SinkhornAttention, balance

pytestmark = pytest.mark.peers
BLOCK, TOKENS = 4, 16


def given(seed: int = 1) -> tuple[Tensor, Tensor]:
    return torch.randn(2, B, H, TOKENS, E, generator=torch.Generator().manual_seed(seed)).unbind()


def test_balancing_is_theirs_with_sides_exchanged() -> None:
    peer = pytest.importorskip("sinkhorn_transformer.sinkhorn_transformer")
    scores = torch.randn(3, 5, 5, generator=torch.Generator().manual_seed(0))
    want = peer.sinkhorn_sorting_operator(scores.mT, 7).mT
    ours = balance(scores[:, None], torch.ones(5, 5, dtype=torch.bool), 7, causal=False)[:, 0]
    torch.testing.assert_close(ours, want, rtol=0, atol=1e-6)


def test_attention_with_a_given_matrix_is_theirs_where_values_are_the_keys() -> None:
    """Their sorted values are taken from the keys, so that both agree only where these are the same."""
    peer = pytest.importorskip("sinkhorn_transformer.sinkhorn_transformer")
    theirs = peer.SinkhornAttention(BLOCK, H * E, E, H, TOKENS).eval()
    ours = SinkhornAttention(H * E, H, BLOCK, own_block=True).eval()
    r = torch.rand(B, H, 4, 4, generator=torch.Generator().manual_seed(0)).softmax(-1)
    theirs.sort_net.forward = lambda q, k, topk: r.flatten(0, 1)
    ours._permutation = lambda *_: r  # type: ignore[method-assign]
    q, k = given()
    torch.testing.assert_close(ours(q, k, k).out_BHNV, theirs(q, k, k), rtol=0, atol=1e-6)
    v = given(2)[0]
    assert (ours(q, k, v).out_BHNV - theirs(q, k, v)).abs().max() > 0.1
    changed = v.clone()
    changed[:, :, BLOCK:] += 1
    assert (ours(q, k, v).out_BHNV - ours(q, k, changed).out_BHNV)[:, :, :BLOCK].abs().max() > 0.1
    torch.testing.assert_close(theirs(q, k, v)[:, :, :BLOCK], theirs(q, k, changed)[:, :, :BLOCK], rtol=0, atol=0)
