"""Linformer against PyPI's `linformer` (github.com/lucidrains/linformer), values and gradients."""

from __future__ import annotations

import pytest
import torch
from attentions.agreement import agree

from cached_transformers.attentions import create_attention

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("tokens", [24, 9])
def test_the_package_computes_the_same(share: bool, tokens: int) -> None:
    linformer = pytest.importorskip("linformer.linformer")
    peer = linformer.LinformerSelfAttention(12, 24, k=4, heads=2, share_kv=share).double().eval()
    options = {"name": "linformer", "slots": 4, "sharing": "keys_values" if share else "heads"}
    core = create_attention(options, heads=2, length=24).double().eval()
    projections = [peer.proj_k] if share else [peer.proj_k, peer.proj_v]
    core.projection_PGLS.data.copy_(torch.stack(projections)[:, None])
    x = torch.randn(2, tokens, 12, dtype=torch.double, requires_grad=True)
    to_v = peer.to_k if share else peer.to_v  # it shares the projection of features with that of places
    q, k, v = (f(x).unflatten(-1, (2, 6)).transpose(1, 2) for f in (peer.to_q, peer.to_k, to_v))
    got = peer.to_out(core(q, k, v).out_BHNV.transpose(1, 2).flatten(2))
    agree(got, peer(x), [x, *peer.to_q.parameters(), *peer.to_k.parameters()])
