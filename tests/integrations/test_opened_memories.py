"""Layer memories that a decoder of transformers opens once a segment and reads token by token."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from integrations.transformers_hosts import GPT2, LLAMA, SEGMENT, awaken, differences, words
from torch import Tensor

from cached_transformers import add_memory
from cached_transformers.state import reorder

SLOTS: dict[str, Any] = {
    "transformer_xl": {"name": "transformer_xl", "length": 5},
    "expire_span": {"name": "expire_span", "length": 9, "price": 0},
    "infinity_former": {"name": "infinity_former", "length": 5, "kl_weight": 0},
    "block_retrieval": {"name": "block_retrieval", "block": 3, "topk": 2, "retrieve": "segments"},
}
ADVANCING: dict[str, Any] = {
    "titans": {"name": "titans", "chunk": 4},
    "ttt": {"name": "ttt", "mini_batch": 4},
    "memory_caching": {"name": "memory_caching", "over": {"name": "titans", "chunk": 4}},
    "delta_mem": {"name": "delta_mem", "half_life": 4.0},
}
OTHERS: dict[str, Any] = {
    "grc_stream": {"name": "grc_stream", "length": 4},
    "infini": "infini",
    "memorizing": {"name": "memorizing", "length": 8, "k": 4, "layer": 1},
    "armt": {"name": "armt", "length": 2, "key_width": 4},
}
MEMORIES = {**SLOTS, **ADVANCING, **OTHERS}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "samples": {"do_sample": True, "num_return_sequences": 2},
}
FIXED: dict[str, Any] = {"min_new_tokens": 2 * SEGMENT, "max_new_tokens": 2 * SEGMENT, "pad_token_id": 0}
FIXED |= {"output_scores": True, "return_dict_in_generate": True}
memories = pytest.mark.parametrize("memory", MEMORIES)
changing = pytest.mark.parametrize("memory", ["grc_stream", "expire_span", "titans", "memory_caching"])


def built(memory: str, layers: int = 2) -> Any:
    host = LLAMA if memory in SLOTS else GPT2
    return awaken(add_memory(host.build(num_hidden_layers=layers), MEMORIES[memory], segment_length=SEGMENT)).double()


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@memories
@pytest.mark.parametrize("call", CALLS)
def test_generation_with_a_cache_is_generation_without(memory: str, call: str) -> None:
    model, ids = built(memory), words(2, SEGMENT + 2)
    mask, outs = torch.ones_like(ids), []
    mask[1, : 3 if call == "samples" else 0] = 0  # the partial segments of both rows then differ in length
    for use_cache in (True, False):
        torch.manual_seed(1)
        outs.append(model.generate(ids, attention_mask=mask, use_cache=use_cache, **FIXED, **CALLS[call]))
    found, expected = outs
    assert torch.equal(found.sequences, expected.sequences)
    assert differences(found.memory_state, expected.memory_state) < 1e-10
    for a, b in zip(found.scores, expected.scores, strict=True):
        close(a, b)


@memories
@torch.no_grad()
def test_a_segment_is_opened_once_and_each_token_read_once(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, opened = built(memory), []
    read: list[int] = []
    first = next(m for name, m in model.named_modules() if name.endswith((".h.0", ".layers.0")))
    first.register_forward_pre_hook(lambda _, args: read.append(args[0].shape[1]))
    kinds = {type(m) for m in model.modules() if hasattr(m, "open") and hasattr(m, "write")}
    for kind in kinds:
        own = kind.open
        monkeypatch.setattr(kind, "open", lambda *given, own=own: opened.append(1) or own(*given))
    state = model(words(1, SEGMENT), use_cache=False).memory_state
    once, opened[:], read[:] = len(opened), [], []
    model.generate(words(1, 2), memory_state=state, max_new_tokens=SEGMENT - 2, do_sample=False, eos_token_id=None)
    assert read[1:] == [1] * (SEGMENT - 3)
    unchanged = memory == "memorizing"  # its state is opened as it is
    assert len(opened) == once or unchanged


@changing
@torch.no_grad()
def test_a_copy_of_a_cache_continues_other_rows(memory: str) -> None:
    model, ids, other = built(memory), words(2, 6), words(2, 6, 1)
    state = model(words(2, 2 * SEGMENT, 2)).memory_state
    cache = model(ids[:, :2], memory_state=state, use_cache=True).past_key_values
    model(ids[:, 2:3], past_key_values=cache)
    fork = copy.deepcopy(cache)
    fork.reorder_cache(torch.tensor([1, 0]))
    for t in range(3, 6):
        for text, read, order in ((ids, cache, [0, 1]), (other, fork, [1, 0])):
            found = model(text[:, t : t + 1], past_key_values=read).logits[:, -1]
            whole, before = torch.cat([ids[order, :3], text[:, 3 : t + 1]], 1), reorder(state, torch.tensor(order))
            close(found, model(whole, memory_state=before, use_cache=False).logits[:, -1])


@changing
def test_a_second_call_of_generate_reads_with_the_weights_of_its_time(memory: str) -> None:
    model, ids = built(memory, layers=1), words(2, 6)  # keys and values of one layer do not depend on the memory
    state = model(words(2, 2 * SEGMENT, 2)).memory_state
    options = {"do_sample": False, **FIXED, "min_new_tokens": 2, "max_new_tokens": 2}
    first = model.generate(ids[:, :2], memory_state=state, **options)
    before = model.generate(first.sequences, memory_state=state, **options)
    awaken(model, seed=4)
    found = model.generate(first.sequences, past_key_values=first.past_key_values, **options)
    expected = model.generate(first.sequences, memory_state=state, use_cache=False, **options)
    assert not torch.equal(before.scores[0], expected.scores[0])
    for a, b in zip(found.scores, expected.scores, strict=True):
        close(a, b)


@changing
def test_with_a_gradient_a_memory_is_opened_again(memory: str) -> None:
    model, ids = built(memory, layers=1), words(2, 4)
    with torch.no_grad():
        state = model(words(2, 2 * SEGMENT, 2)).memory_state
        cache = model(ids[:, :2], memory_state=state, use_cache=True).past_key_values
        model(ids[:, 2:3], past_key_values=cache)
    outs = model(ids[:, 3:], past_key_values=cache), model(ids, memory_state=state, use_cache=False)
    weights = {name: p for name, p in model.named_parameters() if ".memory." in name}
    gradients = [
        torch.autograd.grad(o.logits[:, -1].square().sum(), list(weights.values()), allow_unused=True) for o in outs
    ]
    assert any(g is not None and bool(g.abs().sum()) for g in gradients[1])
    for a, b in zip(*gradients, strict=True):
        close(*(torch.zeros(()) if g is None else g for g in (a, b)))


@memories
@torch.no_grad()
def test_a_prompt_under_autocast_continues_outside_of_it(memory: str) -> None:
    model, ids = built(memory).float(), words(2, 4)
    state = model(words(2, 2 * SEGMENT, 2)).memory_state
    with torch.autocast("cpu", torch.bfloat16):
        cache = model(ids[:, :3], memory_state=state, use_cache=True).past_key_values
    found = model(ids[:, 3:], past_key_values=cache).logits[:, -1]
    expected = model(ids, memory_state=state, use_cache=False).logits[:, -1]
    torch.testing.assert_close(found, expected, rtol=0, atol=0.2)


@pytest.mark.parametrize("memory", ADVANCING)
@torch.no_grad()
def test_padding_within_a_text_changes_no_memory(memory: str) -> None:
    model, ids = built(memory), words(2, 7)
    mask = torch.ones_like(ids)
    mask[1, 5] = 0
    cache = None
    for t in range(7):
        found = model(ids[:, t : t + 1], attention_mask=mask[:, : t + 1], past_key_values=cache, use_cache=True)
        cache = found.past_key_values
    close(found.logits[1, -1], model(ids[1:, mask[1] == 1], use_cache=False).logits[0, -1])
    close(found.logits[0, -1], model(ids[:1], use_cache=False).logits[0, -1])
