"""Where the segments of GPT-2 and Llama begin: the length that must be given, rows of unequal length."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from integrations.transformers_hosts import (
    DECODERS,
    GPT2,
    LLAMA,
    PAD,
    SEGMENT,
    STREAMS,
    Architecture,
    architectures,
    awaken,
    differences,
    stream,
    streams,
    words,
)
from torch import Tensor

from cached_transformers import add_memory, load_pretrained, remove_memory
from cached_transformers.state import map_state

COUNTS = (2 * SEGMENT + 3, 3, SEGMENT)
"""Tokens of the rows of a batch of prompts."""


FIRST = [(GPT2, "rmt", True), (LLAMA, "grc_stream", True), (GPT2, "memorizing", True), (LLAMA, "rmt", False)]
UNEQUAL = [
    case if case in FIRST else pytest.param(*case, marks=pytest.mark.slow)
    for case in itertools.product(DECODERS, STREAMS, (True, False))
]
"""Host, memory, and whether keys and values are kept."""


def row(state: Any, index: int) -> Any:
    return map_state(lambda t: t[index : index + 1], state)


def padded(side: str = "left") -> tuple[Tensor, Tensor]:
    """Tokens and mask of texts with as many tokens, which end, or begin, in one column."""
    total = max(COUNTS)
    mask = torch.stack([torch.arange(total) >= total - count for count in COUNTS]).long()
    mask = mask if side == "left" else mask.flip(1)
    return words(len(COUNTS), total).masked_fill(mask == 0, PAD), mask


# ---- segment_length


@architectures(DECODERS)
@pytest.mark.parametrize("memory", ["grc_stream", "memorizing", "rmt", "outside"])
def test_a_memory_with_a_state_must_be_told_its_segments(host: Architecture, memory: str) -> None:
    model = host.build()
    before = {name: sorted(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=r"segment_length is missing.*segment_length=\d+.*=None"):
        add_memory(model, STREAMS[memory])
    assert {name: sorted(vars(module)) for name, module in model.named_modules()} == before
    ids = words(2, 2 * SEGMENT)
    assert add_memory(model, STREAMS[memory], segment_length=None)(ids).logits.isfinite().all()


def test_the_suggested_length_is_one_that_the_model_takes() -> None:
    with pytest.raises(ValueError, match=r"segment_length=58\b"):  # 64 positions, 6 of them for memory tokens
        add_memory(GPT2.build(), "rmt", length=3)
    with pytest.raises(ValueError, match=r"segment_length=256\b"):
        add_memory(LLAMA.build(), "grc_stream")
    add_memory(GPT2.build(), "rmt", length=3, segment_length=58)
    add_memory(GPT2.build(), "memory_transformer", length=3)  # carries nothing, so that no length is missing


def test_one_segment_a_call_is_saved_and_loaded_as_such(tmp_path: Any) -> None:
    model, ids = awaken(add_memory(GPT2.build(), "grc_stream", length=4, segment_length=None)), words(2, 20)
    model.save_pretrained(tmp_path)
    again = load_pretrained(str(tmp_path))
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert again.transformer.segment_reader.segment_length is None
    assert remove_memory(again) is again


# ---- rows of unequal length


@architectures(DECODERS)
@streams
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_have_segments_of_their_own(host: Architecture, memory: str, side: str) -> None:
    model = awaken(stream(host, memory)).train()
    ids, mask = padded(side)
    whole = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), output_hidden_states=True)
    for index, real in enumerate(mask.bool()):
        alone = model(ids[index : index + 1, real], output_hidden_states=True)
        torch.testing.assert_close(whole.logits[index, real], alone.logits[0], rtol=1e-5, atol=1e-5)
        hidden = (whole.hidden_states[1][index, real], alone.hidden_states[1][0])
        torch.testing.assert_close(*hidden, rtol=1e-5, atol=1e-5)
        assert differences(row(whole.memory_state, index), alone.memory_state) < 1e-5
    whole.loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("host, memory, use_cache", UNEQUAL, ids=str)
def test_a_batch_of_unequal_prompts_gives_each_the_text_of_that_prompt_alone(
    host: Architecture, memory: str, use_cache: bool
) -> None:
    model = awaken(stream(host, memory))
    ids, mask = padded()
    past = model(words(len(COUNTS), SEGMENT + 1, 5)).memory_state
    call = {
        "max_new_tokens": 3 * SEGMENT + 1,
        "min_new_tokens": 3 * SEGMENT + 1,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
        "use_cache": use_cache,
    }
    out = model.generate(ids, attention_mask=mask, memory_state=past, **call)
    for index, count in enumerate(COUNTS):
        text = ids[index : index + 1, -count:]
        alone = model.generate(text, attention_mask=torch.ones_like(text), memory_state=row(past, index), **call)
        assert torch.equal(out.sequences[index, ids.shape[1] :], alone.sequences[0, count:])
        for a, b in zip(out.logits, alone.logits, strict=True):
            torch.testing.assert_close(a[index], b[0], rtol=1e-5, atol=1e-5)
        assert differences(row(out.memory_state, index), alone.memory_state) < 1e-5


@pytest.mark.parametrize("host, memory", [(GPT2, "rmt"), (LLAMA, "memorizing")], ids=str)
def test_beams_of_unequal_prompts_are_those_of_each_alone(host: Architecture, memory: str) -> None:
    model = awaken(stream(host, memory))
    ids, mask = padded()
    call = {"max_new_tokens": 2 * SEGMENT, "min_new_tokens": 2 * SEGMENT, "num_beams": 3, "do_sample": False}
    found = model.generate(ids, attention_mask=mask, **call)
    for index, count in enumerate(COUNTS):
        text = ids[index : index + 1, -count:]
        alone = model.generate(text, attention_mask=torch.ones_like(text), **call)
        assert torch.equal(found[index, ids.shape[1] :], alone[0, count:])


@architectures(DECODERS)
@streams
@torch.no_grad()
def test_a_padded_text_in_pieces_of_any_size_is_the_text(host: Architecture, memory: str) -> None:
    """Padding wherever it stands: in front, behind, and between two calls."""
    model, ids = awaken(stream(host, memory)), words(3, 18)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[1, :1] = mask[1, 9:12] = mask[2, 3:5] = mask[2, 17:] = 0
    cache, parts, done = None, [], 0
    for size in (5, 1, 6, 1, 4, 1):
        done += size
        out = model(ids[:, done - size : done], attention_mask=mask[:, :done], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    logits = torch.cat(parts, 1)
    for index in range(3):
        real = mask[index].bool()
        alone = model(ids[index : index + 1, real])
        torch.testing.assert_close(logits[index : index + 1, real], alone.logits, rtol=1e-4, atol=1e-5)
        assert differences(row(cache.memory_state, index), alone.memory_state) < 1e-5
