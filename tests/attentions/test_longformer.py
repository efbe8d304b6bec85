"""Longformer against the definition pair by pair, its limits, its cost, and the model of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attentions.agreement import agree, inputs
from attentions.dense import Rule, assert_is_pattern, mask_of, softmax_over
from common import refuses
from torch import Tensor

from cached_transformers.attentions.longformer import LongformerAttention
from cached_transformers.torchvision_guard import ensure_torchvision

LENGTHS = (1, 2, 3, 7, 8, 13, 24)


def definition(causal: bool, window: int, dilation: tuple[int, ...] = (1, 1), places: tuple[int, ...] = ()) -> Rule:
    def sees(h: int, i: int, j: int) -> bool:
        step = dilation[h]
        reach = window if causal else window // 2
        near = abs(i - j) <= reach * step and (i - j) % step == 0
        return (near or i in places or j in places) and (j <= i or not causal)

    return sees


@pytest.mark.parametrize(
    ("options", "dilation", "places"),
    [
        ({"window": 4}, (1, 1), ()),
        ({"window": 2, "dilation": 3}, (3, 3), ()),
        ({"window": 4, "dilation": (1, 3), "prefix": 2}, (1, 3), (0, 1)),
        ({"window": 6, "dilation": (2, 1), "prefix": 1, "global_tokens": (5, 6, 12)}, (2, 1), (0, 5, 6, 12)),
        ({"window": 4, "global_tokens": (3,)}, (1, 1), (3,)),
    ],
)
def test_it_is_the_definition(options: dict[str, Any], dilation: tuple[int, ...], places: tuple[int, ...]) -> None:
    core = LongformerAttention(**options)
    assert_is_pattern(core, lambda causal: definition(causal, options["window"], dilation, places), LENGTHS)


@pytest.mark.parametrize("tokens", [3, 8, 13])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_global_tokens_look_with_projections_of_their_own(tokens: int, causal: bool, padded: bool) -> None:
    core = LongformerAttention(
        window=4, prefix=1, global_tokens=(6,), global_projections=True, width=12, heads=2
    ).double()
    q, k, v = inputs(tokens, values=6)
    x = torch.randn(2, tokens, 12, dtype=torch.double, requires_grad=True)
    padding = torch.zeros(2, tokens, dtype=torch.bool)
    padding[0, -2:] = padded
    assert core.query is not None and core.key_value is not None

    def heads(t: Tensor) -> Tensor:
        return t.reshape(2, tokens, 2, 6).transpose(1, 2)

    q_all = heads(core.query(x))
    k_all, v_all = (heads(t) for t in core.key_value(x).split(12, -1))
    mask = mask_of(definition(causal, 4, places=(0, 6)), 2, tokens)
    near = softmax_over(q, k, v, mask, padding)
    wide = softmax_over(q_all, k_all, v_all, mask, padding)
    is_global = torch.tensor([place in (0, 6) for place in range(tokens)])[:, None]
    want = torch.where(is_global, wide, near)
    got = core(q, k, v, x_BND=x, causal=causal, key_padding_mask=padding).out_BHNV
    agree(got, want, [q, k, v, x, *core.parameters()])


def test_windows_and_dilations_of_layers_and_bad_calls() -> None:
    windows, dilations = (2, 4, 8), ((1, 1), (1, 2), (1, 3))
    for index in range(3):
        core = LongformerAttention(window=windows, dilation=dilations, index=index)
        assert_is_pattern(core, lambda c, n=index: definition(c, windows[n], dilations[n]), [13])
    refuses("one for each of the 2 heads", LongformerAttention(window=2, dilation=(1, 2, 3)), *inputs(5))
    core = LongformerAttention(window=2, prefix=1, global_projections=True, width=12, heads=2)
    refuses("needs the layer's input", core, *inputs(5, values=6))
    refuses("values as wide as the keys", core, *inputs(5), x_BND=torch.zeros(2, 5, 12))


def test_dropout_drops_in_training_alone() -> None:
    core, sources = LongformerAttention(window=4, prefix=1, dropout=0.5), inputs(13)
    torch.manual_seed(0)
    first, second = (core(*sources).out_BHNV for _ in range(2))
    assert (first != second).any()
    core.eval()
    assert torch.equal(core(*sources).out_BHNV, core(*sources).out_BHNV)


@pytest.mark.parametrize("places", [(), (0,), (0, 1, 17)])
def test_it_is_the_layer_of_transformers(places: tuple[int, ...]) -> None:
    ensure_torchvision()  # transformers imports it where it is installed, fitting or not
    longformer = pytest.importorskip("transformers.models.longformer.modeling_longformer")
    torch.manual_seed(0)
    width, heads, tokens, window = 12, 2, 24, 8
    config = longformer.LongformerConfig(
        hidden_size=width,
        num_attention_heads=heads,
        num_hidden_layers=1,
        attention_window=[window],
        attention_probs_dropout_prob=0.0,
    )
    layer = longformer.LongformerSelfAttention(config, 0).double()
    x = torch.randn(2, tokens, width, dtype=torch.double)
    padding = torch.zeros(2, tokens, dtype=torch.bool)
    padding[0, -5:] = True
    is_global = torch.zeros(2, tokens, dtype=torch.bool)
    is_global[:, list(places)] = True
    mask = torch.zeros(2, tokens, dtype=torch.double).masked_fill(is_global, 1e4).masked_fill(padding, -1e4)
    want = layer(x, mask, padding, is_global & ~padding, bool(places))[0]
    core = LongformerAttention(
        window=window, global_tokens=places, global_projections=bool(places), width=width, heads=heads
    ).double()
    if core.query is not None and core.key_value is not None:
        core.query.load_state_dict(layer.query_global.state_dict())
        for name in ("weight", "bias"):
            both = torch.cat([getattr(part, name) for part in (layer.key_global, layer.value_global)])
            getattr(core.key_value, name).data.copy_(both)
    q, k, v = (m(x).unflatten(-1, (heads, -1)).transpose(1, 2) for m in (layer.query, layer.key, layer.value))
    got = core(q, k, v, x_BND=x, key_padding_mask=padding).out_BHNV.transpose(1, 2).flatten(2)
    there = ~padding[..., None]
    torch.testing.assert_close(got * there, want * there, rtol=0, atol=1e-6)  # its softmax is of float32
