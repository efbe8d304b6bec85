"""Another attention in transformers' BART, T5, SwitchTransformers, GPT-2 and Llama, with or without a memory."""

from __future__ import annotations

import pytest
import torch
from integrations.transformers_hosts import (
    BART,
    DECODERS,
    GPT2,
    LLAMA,
    T5,
    Architecture,
    architectures,
    awaken,
    call_of,
    words,
)

from cached_transformers import replace_attention, restore_attention

ALL = [BART, T5, *DECODERS]


@architectures(ALL)
@pytest.mark.parametrize("memory", [False, True])
def test_exact_attention_changes_nothing(host: Architecture, memory: bool) -> None:
    """Neither T5's bias and missing scale, nor Llama's shared keys and rotary positions, nor what a memory adds."""
    plain, model = (awaken(host.with_memory()) if memory else host.build() for _ in range(2))
    replace_attention(model, "softmax")
    call = call_of(host)
    torch.testing.assert_close(model(**call).logits, plain(**call).logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(restore_attention(model)(**call).logits, plain(**call).logits)


@pytest.mark.usefixtures("cores")
@architectures([BART, GPT2, LLAMA])
def test_a_window_is_heard(host: Architecture) -> None:
    """In an encoder-decoder the encoder alone has it; a decoder stays causal."""
    plain, model = host.build(), replace_attention(host.build(), {"name": "test_window", "radius": 1})
    ids = words(2, 8)
    what = "logits" if host in DECODERS else "encoder_last_hidden_state"
    assert (model(input_ids=ids)[what] - plain(input_ids=ids)[what]).abs().max() > 1e-5
    assert len([m for m in model.modules() if "core" in m._modules]) == 2
    if host in DECODERS:
        changed = ids.clone()
        changed[:, 5:] = 4
        torch.testing.assert_close(model(changed).logits[:, :5], model(ids).logits[:, :5])
