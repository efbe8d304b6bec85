"""Slots of a memory as the KV cache of the plain decoder: the logits of the next tokens stay the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from common import refuses
from integrations.families import EIGHT, GROUPED, decoder, words

from cached_transformers import add_memory, export_cache

LLAMA = decoder("llama", "Llama", **GROUPED)
SLIDING = {**GROUPED, "sliding_window": 16}
HOSTS = [LLAMA, decoder("qwen3", "Qwen3", **EIGHT), decoder("bloom", "BLOOM"), decoder("mistral", "Mistral", **SLIDING)]
MEMORIES: list[dict[str, Any]] = [
    {"name": "streaming_llm", "length": 7, "sinks": 2, "keep": "kv"},
    {"name": "transformer_xl", "length": 6},
    {"name": "compressive", "length": 6, "compressed": 3, "rate": 2, "function": "mean"},
    {"name": "expected_attention", "length": 9, "observe": 2},
    {"name": "crtn", "segment": 5, "placed": "packed", "weighted": False},
]


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.name)
@pytest.mark.parametrize("spec", MEMORIES, ids=lambda spec: spec["name"])
def test_the_plain_decoder_goes_on_as_the_one_with_the_memory(host: Any, spec: dict[str, Any]) -> None:
    plain = host.build().eval().double()
    model = add_memory(copy.deepcopy(plain), spec, segment_length=5)
    state = model(words(tokens=30)).memory_state
    question = words(tokens=4, seed=3)
    cache = export_cache(model, state)
    wanted = model(question, memory_state=state).logits
    alone = plain(question).logits
    found = plain(question, past_key_values=cache).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)  # the host computes its rotation in float32
    assert (wanted - alone).abs().max() > 1e-3 and cache.get_seq_length() > question.shape[1]


def test_states_that_are_no_kv_cache_are_refused() -> None:
    text = words(tokens=12)
    weighted = add_memory(LLAMA.build().eval(), "crtn", segment=5, segment_length=5)
    refuses(r"layer 0.*places='cache'", export_cache, weighted, weighted(text).memory_state)
    infini = add_memory(LLAMA.build().eval(), "infini", segment_length=5)
    refuses(r"Infini needs.*head", export_cache, infini, infini(text).memory_state)
    refuses("add_memory", export_cache, LLAMA.build(), ())
    model = add_memory(LLAMA.build().eval(), "streaming_llm", length=20, segment_length=5)
    refuses("read a text first", export_cache, model, model.init_memory_state(2))
    mask = torch.ones_like(text)
    mask[0, :4] = 0
    refuses(r"\[8, 12\]", export_cache, model, model(text, attention_mask=mask).memory_state)
