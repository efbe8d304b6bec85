"""Memory-compressed attention against PyPI's package (github.com/lucidrains/memory-compressed-attention)."""

from __future__ import annotations

import math

import pytest
import torch
from attentions.agreement import agree

from cached_transformers.attentions import create_attention

pytestmark = pytest.mark.peers
RATE, WIDTH, HEADS = 3, 12, 2


def peer(causal: bool = False) -> torch.nn.Module:
    package = pytest.importorskip("memory_compressed_attention")
    module = (
        package.MemoryCompressedAttention(WIDTH, heads=HEADS, causal=causal, compression_factor=RATE).double().eval()
    )
    for null in (module.null_k, module.null_v):
        torch.nn.init.normal_(null)
    assert isinstance(module, torch.nn.Module)
    return module


@pytest.mark.parametrize("causal", [False, True])
def test_the_package_computes_the_same_but_for_its_scale(causal: bool) -> None:
    """It divides logits by the root of the model's width, not of a head's; one convolution serves keys and values."""
    theirs = peer(causal)
    core = create_attention(
        {"name": "memory_compressed", "null": True, "rate": RATE}, width=WIDTH, heads=HEADS
    ).double()
    conv = theirs.compress_fn.conv
    for compression in (core.keys, core.values):
        compression.weight_GFO.data.copy_(conv.weight.view(HEADS, 6, 6, RATE).permute(0, 3, 2, 1).flatten(1, 2))
        compression.bias_GO.data.copy_(conv.bias.view(HEADS, 6))
    core.null_HE.data.copy_(theirs.null_k.view(HEADS, 6))
    core.null_HV.data.copy_(theirs.null_v.view(HEADS, 6))
    x = torch.randn(2, 12, WIDTH, dtype=torch.double, requires_grad=True)
    q, k, v = (t.unflatten(-1, (HEADS, 6)).transpose(1, 2) for t in theirs.to_qkv(x).chunk(3, -1))
    out = core(q * math.sqrt(6 / WIDTH), k, v, causal=causal).out_BHNV
    agree(theirs.to_out(out.transpose(1, 2).flatten(2)), theirs(x), [x, *theirs.to_qkv.parameters()])
