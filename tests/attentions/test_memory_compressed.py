"""Memory-compressed attention against loops over queries and slots."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from attentions.agreement import agree, inputs, tail
from attentions.dense import padding_last
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.attentions import create_attention, memory_compressed
from cached_transformers.attentions.memory_compressed import Compression, MemoryCompressedAttention


def make(**options: Any) -> MemoryCompressedAttention:
    """With parameters that are not those it starts with."""
    spec = {"name": "memory_compressed", "width": 12, "heads": 2, "value_width": 5, **options}
    core = create_attention(spec).double().eval()
    assert isinstance(core, MemoryCompressedAttention)
    for parameter in core.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.3)
    return core


def slots(compression: Compression, t: Tensor) -> list[list[Tensor]]:
    """(H of S of E): every slot as a sum over its tokens, of one row (H, M, E)."""
    heads, tokens, width = t.shape
    shape = (compression.rate, width)
    made: list[list[Tensor]] = [[] for _ in range(heads)]
    for start in range(0, tokens, compression.rate):
        inside = range(start, min(start + compression.rate, tokens))
        for h in range(heads):
            if compression.full:
                weight = compression.weight_GFO[0].view(heads, *shape, heads, width)[..., h, :]
                total = compression.bias_GO[0].view(heads, width)[h]
                for j in inside:
                    total = total + sum(t[g, j] @ weight[g, j - start] for g in range(heads))
            else:
                total = compression.bias_GO[h]
                for j in inside:
                    total = total + t[h, j] @ compression.weight_GFO[h].view(*shape, width)[j - start]
            made[h].append(total)
    return made


def twin(
    core: MemoryCompressedAttention, causal: bool, q: Tensor, k: Tensor, v: Tensor, padding: Tensor | None
) -> Tensor:
    """One query at a time; the keys that it sees are put in a list."""
    c, rows = core.rate, []
    for b in range(len(q)):
        gone = [False] * k.shape[2] if padding is None else padding[b].tolist()
        there = [j for j, no in enumerate(gone) if not no]
        keys, values = slots(core.keys, k[b][:, there]), slots(core.values, v[b][:, there])
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                pairs = []
                if core.null_HE is not None and core.null_HV is not None and not all(gone):
                    pairs.append((core.null_HE[h], core.null_HV[h]))
                for s, pair in enumerate(zip(keys[h], values[h], strict=True)):
                    if not causal or ((s + 1) * c <= len(there) and there[(s + 1) * c - 1] <= i):
                        pairs.append(pair)
                for j in range(k.shape[2]):
                    if not gone[j] and (i >= j if causal else j - i < core.local) and i - j < core.local:
                        pairs.append((k[b, h, j], v[b, h, j]))
                weights = torch.stack(
                    [(q[b, h, i] @ key / math.sqrt(q.shape[-1])).exp() for key, _ in pairs] or [q[0, 0, 0, 0]]
                )
                mixed = [w / weights.sum() * value for w, (_, value) in zip(weights, pairs, strict=False)]
                rows.append(sum(mixed, v.new_zeros(v.shape[-1])))
    return torch.stack(rows).view(*q.shape[:3], -1)


@pytest.mark.parametrize(
    "options", [{}, {"grouping": "full", "null": True}, {"local": 2, "rate": 2}, {"local": 5, "null": True}]
)
@pytest.mark.parametrize("padded", [False, True])
def test_loops_over_queries_and_slots_give_the_same(
    options: dict[str, Any], padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_compressed, "BLOCK", 3)
    core = make(**options)
    lengths = [(1, 1), (2, 2), (6, 6), (11, 11)] + ([] if core.local else [(4, 7)])
    for queries, keys in lengths:
        for causal in (False, True):
            q, k, v = inputs(queries, keys)
            padding = tail(2, keys) if padded else None
            got = core(q, k, v, causal=causal, key_padding_mask=padding).out_BHNV
            want = padding_last(partial(twin, core, causal), (q, k, v), padding)
            there = 1 if padding is None or queries != keys else ~padding[:, None, :, None]
            agree(got * there, want * there, [q, k, v, *core.parameters()])


@pytest.mark.parametrize("full", [False, True])
def test_the_convolution_is_one_and_starts_as_the_mean(full: bool) -> None:
    compression = Compression(2, 6, 3, full=full).double()
    t = torch.randn(2, 2, 9, 6).double()
    torch.testing.assert_close(compression(t), t.unflatten(2, (3, 3)).mean(3))
    for parameter in compression.parameters():
        parameter.data.normal_()
    groups = 1 if full else 2
    inputs_of_group = 12 // groups
    weight = compression.weight_GFO.mT.reshape(groups * inputs_of_group, -1)
    kernel = weight.view(12, 2, 3, 6).transpose(2, 3).reshape(12, 12, 3) if full else weight.view(12, 3, 6).mT
    want = F.conv1d(t.transpose(2, 3).flatten(1, 2), kernel, compression.bias_GO.flatten(), 3, groups=groups)
    torch.testing.assert_close(compression(t), want.unflatten(1, (2, 6)).transpose(2, 3))


def test_channels_that_do_not_fit() -> None:
    for grouping in ("heads", "full"):
        with pytest.raises(ValueError, match=r"2 heads of 7 channels came, but .* for 10 channels in all"):
            make(grouping=grouping)(*inputs(4, values=7))
