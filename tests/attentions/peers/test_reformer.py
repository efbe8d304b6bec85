"""Reformer's attention beside reformer-pytorch 1.4.4."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attentions.cases import B, E, H
from torch import Tensor

from cached_transformers.attentions.reformer import ReformerAttention

pytestmark = pytest.mark.peers
TOKENS, CHUNK = 32, 4


def inputs(seed: int = 1) -> tuple[Tensor, Tensor]:
    return torch.randn(2, B, H, TOKENS, E, generator=torch.Generator().manual_seed(seed)).unbind()


def theirs(q: Tensor, v: Tensor, rounds: int, *, chunk: int = CHUNK, causal: bool = False) -> Tensor:
    """Each head by itself, as rows, with the rotations that torch's generator gives next."""
    peer = pytest.importorskip("reformer_pytorch.reformer_pytorch")
    core = peer.LSHAttention(bucket_size=chunk, n_hashes=rounds, causal=causal).eval()
    return core(q.flatten(0, 1), v.flatten(0, 1))[0].unflatten(0, q.shape[:2])


def ours(rounds: int, *, chunk: int = CHUNK, **options: Any) -> ReformerAttention:
    """With the same rotations: theirs are those of all heads, in the order (E, R, buckets / 2)."""
    core = ReformerAttention(H * E, H, chunk, rounds, buckets=TOKENS // chunk, allow_leak=True, **options).eval()
    torch.manual_seed(5)
    core.rotations.copy_(torch.randn(1, E, rounds, TOKENS // chunk // 2))
    torch.manual_seed(5)
    return core


@pytest.mark.parametrize("causal", [False, True])
def test_one_round_is_theirs(causal: bool) -> None:
    q, v = inputs()
    core = ours(1)
    want = theirs(q, v, 1, causal=causal)
    torch.testing.assert_close(core(q, q, v, causal=causal).out_BHNV, want, rtol=0, atol=2e-6)
