"""1-D local attention against the package local-attention, whose window size is a block of queries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attentions.agreement import inputs

from cached_transformers.attentions.image_transformer import ImageTransformerAttention
from cached_transformers.attentions.longformer import LongformerAttention

pytestmark = pytest.mark.peers


def peer(**options: Any) -> Any:
    package = pytest.importorskip("local_attention")
    return package.LocalAttention(causal=True, use_rotary_pos_emb=False, autopad=True, **options).eval()


@pytest.mark.parametrize("tokens", [7, 16, 29])
@pytest.mark.parametrize("back", [1, 2])
@pytest.mark.parametrize("padded", [False, True])
def test_blocks_that_look_back(tokens: int, back: int, padded: bool) -> None:
    q, k, v = (t.detach() for t in inputs(tokens, values=6))
    padding = torch.zeros(2, tokens, dtype=torch.bool)
    padding[0, -2:] = padded
    want = peer(window_size=4, look_backward=back, look_forward=0, exact_windowsize=False)(q, k, v, mask=~padding)
    got = ImageTransformerAttention(block=4, memory=4 * back)(q, k, v, causal=True, key_padding_mask=padding).out_BHNV
    there = ~padding[:, None, :, None]
    torch.testing.assert_close(got * there, want * there, rtol=0, atol=1e-6)


@pytest.mark.parametrize("back", [1, 2])
def test_its_exact_windows_are_those_of_longformer(back: int) -> None:
    q, k, v = (t.detach() for t in inputs(29, values=6))
    want = peer(window_size=4, look_backward=back, look_forward=0, exact_windowsize=True)(q, k, v)
    got = LongformerAttention(window=4 * back)(q, k, v, causal=True).out_BHNV
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
