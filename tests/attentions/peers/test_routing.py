"""The Routing Transformer's attention beside routing-transformer 1.6.1."""

from __future__ import annotations

import pytest
import torch
from attentions.cases import B, E, H
from torch import Tensor

from cached_transformers.attentions.routing import RoutingAttention

pytestmark = pytest.mark.peers
TOKENS = 24


def inputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(3, B, H, TOKENS, E, generator=torch.Generator().manual_seed(seed)).unbind()


@pytest.mark.parametrize(("clusters", "window"), [(1, TOKENS), (4, 6), (3, 11)])
def test_attention_within_clusters_is_theirs(clusters: int, window: int) -> None:
    peer = pytest.importorskip("routing_transformer.routing_transformer")
    theirs = peer.KmeansAttention(clusters, window, H, E, num_mem_kv=0).eval()
    ours = RoutingAttention(H * E, H, clusters, window, combine="mean").eval()
    theirs.kmeans.means.copy_(ours.centroids_HCE)
    theirs.kmeans.initted.fill_(True)
    want, _ = theirs(*inputs(1))
    # They divide by the number of clusters plus 1e-5.
    torch.testing.assert_close(ours(*inputs(1)).out_BHNV, want, rtol=2e-5, atol=1e-6)
    q, k, v = inputs(1)
    padding = torch.zeros(B, TOKENS, dtype=torch.bool)
    padding[0, 15:] = True
    if clusters > 1:
        # They let padding stand among the nearest, so that fewer real tokens are chosen.
        theirs_padded, _ = theirs(q, k, v, query_mask=~padding)
        theirs_trimmed, _ = theirs(q[:1, :, :15], k[:1, :, :15], v[:1, :, :15])
        assert (theirs_padded[:1, :, :15] - theirs_trimmed).abs().max() > 0.1
