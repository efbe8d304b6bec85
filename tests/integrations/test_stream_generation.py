"""Memories with a state in GPT-2 and Llama: lengths of segments, generation, caches, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from integrations.transformers_hosts import (
    GPT2,
    LLAMA,
    SEGMENT,
    STREAMS,
    awaken,
    differences,
    stream,
    words,
)

from cached_transformers import add_memory, create_model, load_pretrained, remove_memory
from cached_transformers.models.generation import generate


@pytest.mark.parametrize("memory", ["grc_stream", "memorizing", "rmt"])
@pytest.mark.parametrize("cached", [True, False])
def test_generate_rolls_over_segments_as_our_generator_does(memory: str, cached: bool) -> None:
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "eos_token_id": None}
    ours = create_model("transformers", vocabulary=30, architecture="gpt2", memory=STREAMS[memory], **sizes).eval()
    theirs = copy.deepcopy(ours.model)
    theirs.transformer.segment_reader.segment_length = SEGMENT
    awaken(ours), awaken(theirs)
    ids = words(2, 7)
    with torch.no_grad():
        state = ours(words(2, SEGMENT, 3)).state
    expected = generate(ours, ids, state, tokens=12, temperature=0, segment_length=SEGMENT)
    found = theirs.generate(
        ids,
        memory_state=state,
        max_new_tokens=12,
        do_sample=False,
        use_cache=cached,
        return_dict_in_generate=True,
        attention_mask=torch.ones_like(ids),
        pad_token_id=0,
    )
    assert torch.equal(found.sequences[:, 7:], expected.tokens)
    assert differences(found.memory_state, expected.state) < 1e-4


def test_without_segment_length_a_call_is_one_segment() -> None:
    model = awaken(stream(GPT2, "grc_stream", None))
    ids = words(2, 17)
    torch.testing.assert_close(model(ids).logits, GPT2.build()(ids).logits)  # nothing is remembered yet
    state = model(ids).memory_state
    out = model.generate(
        ids[:, :2], memory_state=state, max_new_tokens=20, min_new_tokens=20, attention_mask=torch.ones(2, 2)
    )
    assert out.shape == (2, 22)


# ---- segment_length


def test_one_segment_a_call_is_saved_and_loaded_as_such(tmp_path: Any) -> None:
    model, ids = awaken(add_memory(GPT2.build(), "grc_stream", length=4, segment_length=None)), words(2, 20)
    model.save_pretrained(tmp_path)
    again = load_pretrained(str(tmp_path))
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert again.transformer.segment_reader.segment_length is None
    assert remove_memory(again) is again


# ---- refusals

CALLS: list[tuple[str, Any, str]] = [
    ("attentions", lambda m, i, s: m(i, output_attentions=True), "output_attentions=True: .*remove_memory"),
    ("mask", lambda m, i, s: m(i, attention_mask=torch.ones(2, 1, 4, 4)), r"shape \(2, 1, 4, 4\): .*\(2, 4\)"),
    (
        "mask of all",
        lambda m, i, s: m(i, attention_mask=torch.ones(2, 9)),
        r"shape \(2, 9\): .*\(rows, tokens\) = \(2, 4\)",
    ),
    ("nothing", lambda m, i, s: m(), "give either input_ids or inputs_embeds"),
    (
        "assisted",
        lambda m, i, s: m.generate(i[:1], prompt_lookup_num_tokens=2, max_new_tokens=4),
        "past_key_values: .*assisted",
    ),
    ("embeds", lambda m, i, s: m.generate(inputs_embeds=torch.zeros(2, 3, 16), max_new_tokens=2), "with inputs_embeds"),
    (
        "static",
        lambda m, i, s: m.generate(i, cache_implementation="static", max_new_tokens=2),
        "StaticCache.*DynamicCache",
    ),
]


@pytest.mark.parametrize("name, call, message", CALLS, ids=[c[0] for c in CALLS])
def test_calls_that_a_memory_cannot_follow_are_refused(name: str, call: Any, message: str) -> None:
    model, ids = stream(GPT2, "grc_stream"), words(2, 4)
    state = model(ids).memory_state
    with pytest.raises(ValueError, match=message):
        call(model, ids, state)
    assert model(ids).logits.isfinite().all()  # and goes on


def test_caches_of_others_are_refused() -> None:
    plain, model, ids = GPT2.build(), stream(GPT2, "grc_stream"), words(2, 4)
    with pytest.raises(ValueError, match=r"were not made by this model with its memory"):
        model(ids, past_key_values=plain(ids, use_cache=True).past_key_values)
    out = model(ids, use_cache=True)
    with pytest.raises(ValueError, match="memory_state"):
        model(ids[:, :1], past_key_values=out.past_key_values, memory_state=out.memory_state)
    with pytest.raises(ValueError, match="past_key_values"):
        model(ids[:1, :1], past_key_values=out.past_key_values)
    with pytest.raises(ValueError, match=r"called without its state"):
        model.transformer.h[0].attn(torch.zeros(1, 3, 16))
    with pytest.raises(ValueError, match=r"'rmt'.*implementation='flex_attention'.*'sdpa'"):
        other = LLAMA.build()
        other.config._attn_implementation = "flex_attention"
        add_memory(other, "rmt")
    with pytest.raises(ValueError, match=r"have no type"):
        stream(GPT2, "rmt")(ids, token_type_ids=torch.zeros_like(ids))
