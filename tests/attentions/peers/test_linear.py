"""Against the linear attention of performer-pytorch 1.1.4, with the features of the Linear Transformer."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from cached_transformers.attentions.linear import LinearAttention

pytestmark = pytest.mark.peers


def test_sums_over_all_keys_and_over_those_so_far_are_the_same() -> None:
    peer = pytest.importorskip("performer_pytorch.performer_pytorch")
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 130, 16).double()
    features = F.elu(q) + 1, F.elu(k) + 1
    core = LinearAttention(chunk=32)
    torch.testing.assert_close(core(q, k, v).out_BHNV, peer.linear_attention(*features, v), rtol=0, atol=1e-12)
    # Its causal form adds 1e-6 to the sum of the keys.
    want = peer.causal_linear_attention_noncuda(*features, v)
    torch.testing.assert_close(core(q, k, v, causal=True).out_BHNV, want, rtol=0, atol=2e-5)
