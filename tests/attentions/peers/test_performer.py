"""Against performer-pytorch 1.1.4: equal where it computes what the paper says, and where it does not."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

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


def test_with_nothing_added_its_features_give_the_same_attention() -> None:
    peer = pytest.importorskip("performer_pytorch.performer_pytorch")
    core, _ = both(kernel="softmax", causal=False)
    q, k, v = torch.randn(3, 2, 2, 40, 16).double()
    w = core.directions_FE
    phi_q = peer.softmax_kernel(q, projection_matrix=w, is_query=True, eps=0.0)
    phi_k = peer.softmax_kernel(k, projection_matrix=w, is_query=False, eps=0.0)
    want = peer.linear_attention(phi_q, phi_k, v)
    torch.testing.assert_close(core(q, k, v).out_BHNV, want, rtol=0, atol=1e-10)


def test_what_it_adds_makes_it_a_plain_mean() -> None:
    """Inputs of variance 1 at head width 64: the shifted features lie far below the 1e-4 that is added to them."""
    core, other = both(kernel="softmax", causal=False, width=64, count=266)
    q, k, v = torch.randn(3, 1, 2, 64, 64).double()
    mean = v.mean(2, keepdim=True)
    exact, theirs = core(q, k, v).out_BHNV, other(q, k, v)
    assert (theirs - mean).norm() < 0.2 * (exact - mean).norm()
    assert (theirs - exact).norm() > 0.8 * (exact - mean).norm()


def test_its_causal_form_depends_on_later_keys() -> None:
    core, other = both(kernel="softmax", causal=True)
    q, k, v = torch.randn(3, 1, 2, 128, 16).double()
    later = k.clone()
    later[:, :, 64:] *= 3
    ours, theirs = (
        (f(q, k, v) - f(q, later, v))[:, :, :64].abs().max()
        for f in (lambda q, k, v: core(q, k, v, causal=True).out_BHNV, other)
    )
    assert ours < 1e-12 < 1e-2 < theirs


def test_its_directions_make_the_estimate_biased() -> None:
    peer = pytest.importorskip("performer_pytorch.performer_pytorch")
    torch.manual_seed(0)
    width, draws = 8, 500
    theirs = torch.stack([peer.gaussian_orthogonal_random_matrix(width, width) for _ in range(draws)])
    ours = PerformerAttention(width, 1, features=draws * width).directions_FE.view(draws, width, width)
    error = 1 / math.sqrt(draws * width)  # of the mean of one entry of unit vectors in uniform directions
    assert F.normalize(ours, dim=-1).mean(0).abs().max() < 4 * error
    assert F.normalize(theirs, dim=-1).mean(0).abs().max() > 10 * error
