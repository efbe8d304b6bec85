"""Recent memories in decoders of transformers: trained, generated with, saved and loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from integrations import family_checks as checks
from integrations.transformers_hosts import LLAMA, SEGMENT, words

from cached_transformers import add_memory
from cached_transformers.interfaces.memory import LayerMemory


def test_noise_on_weights_trains_every_parameter() -> None:
    """In five steps: the preset's noise leaves no gradient for some in one."""
    model = add_memory(LLAMA.build(), checks.RECENT["armt/llama"], segment_length=SEGMENT)
    ids, losses = words(2, 3 * SEGMENT), []
    own = {name: p.detach().clone() for name, p in model.named_parameters() if "memory." in name}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0)
    for _ in range(5):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    assert own and [name for name, p in model.named_parameters() if name in own and own[name].equal(p)] == []


WIDER = [
    {"name": "titans", "chunk": 4},
    {"name": "titans", "chunk": 4, "place": "context", "persistent": 2, "nets": 3},
    {"name": "ttt", "mini_batch": 3},
    {"name": "lact", "momentum": True},
    {"name": "infini"},
    {"name": "block_recurrent", "length": 2},
    {"name": "memory_caching", "slots": 2},
    {"name": "memory_caching", "slots": 2, "over": {"name": "titans", "layers": 2}, "read": "soup"},
    {"name": "memory_caching", "slots": 2, "over": "ttt"},
]


@pytest.mark.parametrize("head_dim", [8, 4])
@pytest.mark.parametrize("memory", WIDER, ids=str)
def test_heads_that_are_wider_or_narrower_together_than_the_layers_input(memory: dict[str, Any], head_dim: int) -> None:
    """As in Qwen3 and Gemma: 4 heads of 8, or of 4, for 24 channels."""
    sizes = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim}
    model, ids = LLAMA.build(**sizes), words(2, 3 * SEGMENT)
    before = model(ids[:, :SEGMENT]).logits
    add_memory(model, memory, segment_length=SEGMENT)
    outs = model(ids, labels=ids)
    outs.loss.backward()
    own = {name: p for name, p in model.named_parameters() if ".memory." in name}
    assert own and all(p.grad is not None and p.grad.isfinite().all() for p in own.values())
    state = model(ids[:, :SEGMENT]).memory_state
    later = model(ids[:, SEGMENT : 2 * SEGMENT], memory_state=state).logits
    torch.testing.assert_close(later, outs.logits[:, SEGMENT : 2 * SEGMENT], rtol=0, atol=1e-4)
    for layer in model.modules():
        if isinstance(getattr(layer, "memory", None), LayerMemory):
            layer.memory.close_gate()
    torch.testing.assert_close(model(ids[:, :SEGMENT]).logits, before, rtol=0, atol=1e-5)
