"""What goes into models of others with a memory: padding, the fast paths of torch.nn, images of other sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from integrations.hosts import MHA, MHA_TIME_FIRST, PADDED, TOKENS, Host, close_gates, hosts, memories, stored
from torch import nn

from cached_transformers import add_memory, remove_memory, reset_caches


@hosts(PADDED)
@pytest.mark.parametrize("training", [True, False])
def test_a_padded_row_is_the_trimmed_row(host: Host, training: bool) -> None:
    padded, trimmed = host.with_memory(), host.with_memory()
    for row in range(3):
        given = {k: v[row : row + 1] for k, v in host.given(row).items()}
        valid = TOKENS - [0, 2, 3][row]
        short = {k: v[:, :valid] for k, v in given.items()}
        a, b = (host.run(m.train(training), g) for m, g in ((padded, given), (trimmed, short)))
        torch.testing.assert_close(a[:, :valid], b, rtol=0, atol=1e-5)
        for x, y in zip(stored(padded), stored(trimmed), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_the_fused_path_of_the_encoder_does_not_skip_the_memory(padded: bool, grad: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = add_memory(nn.TransformerEncoder(layer, 2), length=4)  # nested tensors are on by default
    x_BND, padding_BN = torch.randn(2, 5, 16), torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1]]).bool()
    mask = {"src_key_padding_mask": padding_BN} if padded else {}
    model(x_BND, **mask)
    model.eval()
    with torch.set_grad_enabled(grad):
        before = model(x_BND, **mask)
        reset_caches(model)
        after = model(x_BND, **mask)
    assert before.shape == (2, 5, 16) and ((before - after).abs().amax(-1) > 1e-5).all()


def test_removing_gives_the_encoder_its_nested_tensors_back() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    assert model.use_nested_tensor
    assert not add_memory(model, length=4).use_nested_tensor
    assert remove_memory(model).use_nested_tensor


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("need_weights, average", [(False, True), (True, True), (True, False)])
def test_a_bare_attention_answers_in_the_shape_of_its_call(
    batch_first: bool, batched: bool, need_weights: bool, average: bool
) -> None:
    plain = (MHA if batch_first else MHA_TIME_FIRST).build()
    model = add_memory((MHA if batch_first else MHA_TIME_FIRST).build(), length=4)
    x = torch.randn(5, 16) if not batched else torch.randn(3, 5, 16) if batch_first else torch.randn(5, 3, 16)
    keep = torch.zeros(5, dtype=torch.bool) if not batched else torch.zeros(3, 5, dtype=torch.bool)
    keep[..., -1] = True
    call: dict[str, Any] = {"need_weights": need_weights, "average_attn_weights": average, "key_padding_mask": keep}
    y, weights = model(x, x, x, **call)
    expected, expected_weights = plain(x, x, x, **call)
    assert y.shape == x.shape and (y - expected).abs().max() > 1e-4
    assert (weights is None) == (not need_weights)
    if need_weights:  # those of the self branch
        torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-6)
    close_gates(model)
    torch.testing.assert_close(model(x, x, x, **call)[0], expected, rtol=0, atol=1e-6)


def test_time_first_and_batch_first_are_the_same_memory() -> None:
    a, b = MHA.with_memory(), MHA_TIME_FIRST.with_memory()
    for seed in range(2):
        x = MHA.given(seed)["query"]
        x_t = x.transpose(0, 1)
        torch.testing.assert_close(a(x, x, x)[0], b(x_t, x_t, x_t)[0].transpose(0, 1), rtol=0, atol=1e-6)
    assert all(torch.allclose(p, q) for p, q in zip(stored(a), stored(b), strict=True))


def test_a_decoder_keeps_its_attentions_and_the_encoder_gets_memories() -> None:
    model = nn.Transformer(16, 2, 1, 2, 32, dropout=0.0, batch_first=True)
    add_memory(model, length=4)
    assert [name for name, m in model.named_modules() if m in memories(model)] == ["encoder.layers.0.self_attn.memory"]
    source, target = torch.randn(2, 5, 16), torch.randn(2, 6, 16)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    out = model(source, target, tgt_mask=mask, tgt_is_causal=True)
    changed = target.clone()
    changed[:, 4:] += 1
    reset_caches(model)
    torch.testing.assert_close(model(source, changed, tgt_mask=mask, tgt_is_causal=True)[:, :4], out[:, :4])
