"""Reformer's attention beside reformer-pytorch 1.4.4."""

from __future__ import annotations

import pytest
import torch
from attentions.cases import B, E, H

from cached_transformers.attentions.reformer import ReformerAttention

pytestmark = pytest.mark.peers
TOKENS, CHUNK = 32, 4


@pytest.mark.parametrize("causal", [False, True])
def test_one_round_is_theirs(causal: bool) -> None:
    """With the same rotations: theirs are those of all heads, in the order (E, R, buckets / 2)."""
    peer = pytest.importorskip("reformer_pytorch.reformer_pytorch")
    q, v = torch.randn(2, B, H, TOKENS, E, generator=torch.Generator().manual_seed(1)).unbind()
    core = ReformerAttention(H * E, H, CHUNK, 1, buckets=TOKENS // CHUNK, allow_leak=True).eval()
    torch.manual_seed(5)
    core.rotations.copy_(torch.randn(1, E, 1, TOKENS // CHUNK // 2))
    torch.manual_seed(5)
    theirs = peer.LSHAttention(bucket_size=CHUNK, n_hashes=1, causal=causal).eval()
    want = theirs(q.flatten(0, 1), v.flatten(0, 1))[0].unflatten(0, q.shape[:2])
    torch.testing.assert_close(core(q, q, v, causal=causal).out_BHNV, want, rtol=0, atol=2e-6)
