"""Recent memories in decoders of transformers: trained, generated with, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.transformers_hosts import GPT2, LLAMA, SEGMENT, Architecture, awaken, by_hand, differences, words

from cached_transformers import add_memory, load_pretrained

CASES: dict[str, tuple[Architecture, dict[str, Any]]] = {
    "armt/gpt2": (GPT2, {"name": "armt", "length": 3, "key_width": 6}),
    "armt/llama": (LLAMA, {"name": "armt", "length": 3, "key_width": 6, "preset": "long"}),
    "armt/mask": (LLAMA, {"name": "armt", "length": 3, "key_width": 6, "mask": "full"}),
    "read_twice/llama": (LLAMA, {"name": "read_twice", "slots": 6, "new_layers": 1}),
    "infini/gpt2": (GPT2, {"name": "infini", "update": "exact", "initial_gate": -4.0}),
    "infini/llama": (LLAMA, {"name": "infini"}),
    "titans/gpt2": (GPT2, {"name": "titans", "chunk": 4, "mix": "sum"}),
    "titans/llama": (LLAMA, {"name": "titans", "chunk": 4}),
    "titans/context": (LLAMA, {"name": "titans", "chunk": 4, "place": "context", "persistent": 2}),
    "block_recurrent/gpt2": (GPT2, {"name": "block_recurrent", "length": 4, "preset": "trained"}),
    "block_recurrent/llama": (LLAMA, {"name": "block_recurrent", "length": 4, "layers": "all", "gate": "lstm"}),
    "memory_caching/gpt2": (GPT2, {"name": "memory_caching", "over": {"name": "titans", "chunk": 4}, "slots": 2}),
    "memory_caching/llama": (LLAMA, {"name": "memory_caching", "slots": 3, "start": "restart"}),
    "ttt/gpt2": (GPT2, {"name": "ttt", "mini_batch": 4, "model": "mlp"}),
    "ttt/llama": (LLAMA, {"name": "ttt", "mini_batch": 3}),
    "lact/gpt2": (GPT2, {"name": "lact", "rate": 0.1}),
    "lact/llama": (LLAMA, {"name": "lact", "nets": 2, "muon": True, "momentum": True}),
    "streaming_llm/llama": (LLAMA, {"name": "streaming_llm", "length": 6, "sinks": 2}),
    "expire_span/llama": (LLAMA, {"name": "expire_span", "length": 12, "ramp": 6, "price": 0}),
}


@pytest.mark.parametrize("case", list(CASES))
def test_a_decoder_trains_and_generates_with_it(case: str, tmp_path: Path) -> None:
    host, memory = CASES[case]
    model, ids = add_memory(host.build(), memory, segment_length=SEGMENT), words(2, 3 * SEGMENT)
    own = {name: p.detach().clone() for name, p in model.named_parameters() if "memory." in name}
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0), []
    for _ in range(5):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    moved = dict(model.named_parameters())
    assert bool(own) == (memory["name"] != "streaming_llm") and [n for n, p in own.items() if moved[n].equal(p)] == []

    awaken(model.eval())
    state, prompt = model(words(2, SEGMENT, 3)).memory_state, words(2, 3, 7)
    call = {"max_new_tokens": 2 * SEGMENT - 1, "num_beams": 3, "do_sample": False, "return_dict_in_generate": True}
    found = [
        model.generate(prompt, memory_state=state, use_cache=cached, attention_mask=torch.ones_like(prompt), **call)
        for cached in (True, False)
    ]
    assert torch.equal(found[0].sequences, found[1].sequences)
    assert differences(found[0].memory_state, found[1].memory_state) < 1e-4
    alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), **call)
    assert differences(alone.memory_state, found[0].memory_state) > 1e-4, "the state that was given counts"

    model.save_pretrained(tmp_path / "mine")
    loaded = load_pretrained(str(tmp_path / "mine"))
    a, b = by_hand(model, ids), by_hand(loaded, ids)
    torch.testing.assert_close(a[0], b[0])
    assert differences(a[1], b[1]) < 1e-6


def test_a_table_of_positions_is_no_place_for_what_titans_keys_are_made_of() -> None:
    with pytest.raises(ValueError, match=r"memory 'titans' needs .*positions are a table .*rotary"):
        add_memory(GPT2.build(), CASES["titans/context"][1], segment_length=SEGMENT)
