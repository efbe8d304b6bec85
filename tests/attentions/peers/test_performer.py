"""Against performer-pytorch 1.1.4: equal where it computes what the paper says, and where it does not."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from cached_transformers.attentions.linear import LinearAttention
from cached_transformers.attentions.performer import PerformerAttention

pytestmark = pytest.mark.peers


def both(*, kernel: str, causal: bool, width: int = 16, count: int = 24) -> tuple[PerformerAttention, torch.nn.Module]:
    peer = pytest.importorskip("performer_pytorch.performer_pytorch")
    torch.manual_seed(0)
    core = PerformerAttention(2 * width, 2, features=count, kernel=kernel, chunk=8)  # type: ignore[arg-type]
    other = peer.FastAttention(width, count, causal=causal, generalized_attention=kernel == "relu")
    core.directions_FE.copy_(other.projection_matrix)
    return core.double(), other.double()


def test_generalised_attention_is_the_same() -> None:
    for causal in (False, True):
        core, other = both(kernel="relu", causal=causal)
        q, k, v = torch.randn(3, 2, 2, 128, 16).double()
        want = other(q, k, v)
        # Its causal form adds 1e-6 to the sum of the keys.
        torch.testing.assert_close(core(q, k, v, causal=causal).out_BHNV, want, rtol=0, atol=1e-5 if causal else 1e-10)


def test_sums_of_linear_attention_over_all_keys_and_over_those_so_far_are_the_same() -> None:
    peer = pytest.importorskip("performer_pytorch.performer_pytorch")
    q, k, v = torch.randn(3, 2, 2, 130, 16).double()
    features = F.elu(q) + 1, F.elu(k) + 1
    core = LinearAttention(chunk=32)
    torch.testing.assert_close(core(q, k, v).out_BHNV, peer.linear_attention(*features, v), rtol=0, atol=1e-12)
    # Its causal form adds 1e-6 to the sum of the keys.
    want = peer.causal_linear_attention_noncuda(*features, v)
    torch.testing.assert_close(core(q, k, v, causal=True).out_BHNV, want, rtol=0, atol=2e-5)


def test_with_nothing_added_its_features_give_the_same_attention() -> None:
    peer = pytest.importorskip("performer_pytorch.performer_pytorch")
    core, _ = both(kernel="softmax", causal=False)
    q, k, v = torch.randn(3, 2, 2, 40, 16).double()
    w = core.directions_FE
    phi_q = peer.softmax_kernel(q, projection_matrix=w, is_query=True, eps=0.0)
    phi_k = peer.softmax_kernel(k, projection_matrix=w, is_query=False, eps=0.0)
    want = peer.linear_attention(phi_q, phi_k, v)
    torch.testing.assert_close(core(q, k, v).out_BHNV, want, rtol=0, atol=1e-10)
