"""Memories with a state in GPT-2 and Llama: generation, texts in pieces, caches, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from integrations.transformers_hosts import (
    DECODERS,
    END,
    GPT2,
    LLAMA,
    SEGMENT,
    STREAMS,
    Architecture,
    architectures,
    awaken,
    by_hand,
    differences,
    stream,
    streams,
    words,
)

from cached_transformers import add_memory, create_model
from cached_transformers.integrations.transformers.memory_cache import MemoryCache
from cached_transformers.models.generation import generate
from cached_transformers.state import map_state, named_tensors


@architectures(DECODERS)
@streams
@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"num_beams": 3}], ids=["greedy", "sampled", "beams"])
def test_generating_from_a_memory_with_and_without_a_cache(
    host: Architecture, memory: str, options: dict[str, Any]
) -> None:
    model = awaken(stream(host, memory))
    state, ids = model(words(2, 2 * SEGMENT)).memory_state, words(2, 3, 7)
    call = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": 2 * SEGMENT,
        "return_dict_in_generate": True,
        "output_scores": True,
        **options,
    }
    found = []
    for use_cache in (True, False):
        torch.manual_seed(5)
        found.append(model.generate(ids, memory_state=state, use_cache=use_cache, **call))
    assert torch.equal(found[0].sequences, found[1].sequences)
    for a, b in zip(found[0].scores, found[1].scores, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert differences(found[0].memory_state, found[1].memory_state) < 1e-5
    torch.manual_seed(5)
    forgetful = model.generate(ids, **call)
    first = (forgetful.scores[0] - found[0].scores[0]).nan_to_num(0, 0, 0).abs().max()
    assert first > 1e-4  # the memory is heard from the first token on
    # What comes back has read all but the last token of each row, in the segments of the text.
    for row, tokens in enumerate(found[0].sequences):
        new = tokens[3:]
        ended = (new == END).nonzero()
        length = 3 + (int(ended[0]) + 1 if len(ended) else len(new))
        own = map_state(lambda t, row=row: t[row : row + 1], state)
        after = own if length == 1 else by_hand(model, tokens[None, : length - 1], own)[1]
        assert differences(map_state(lambda t, row=row: t[row : row + 1], found[0].memory_state), after) < 1e-4


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


@architectures(DECODERS)
@streams
def test_several_answers_for_each_prompt_have_a_state_each(host: Architecture, memory: str) -> None:
    model, ids = awaken(stream(host, memory)), words(2, 4)
    state = model(words(2, SEGMENT)).memory_state
    out = model.generate(
        ids,
        memory_state=state,
        do_sample=True,
        num_return_sequences=2,
        max_new_tokens=4,
        min_new_tokens=4,
        return_dict_in_generate=True,
        attention_mask=torch.ones_like(ids),
    )
    rows = {t.shape[0] for _, t in named_tensors(out.memory_state)}
    assert out.sequences.shape == (4, 8) and rows == {4}
    for row in range(4):
        own = map_state(lambda t, row=row: t[row // 2 : row // 2 + 1], state)
        after = by_hand(model, out.sequences[row : row + 1, :-1], own)[1]
        assert differences(map_state(lambda t, row=row: t[row : row + 1], out.memory_state), after) < 1e-4


@architectures(DECODERS)
@streams
@torch.no_grad()
def test_a_text_in_pieces_of_any_size_is_the_text(host: Architecture, memory: str) -> None:
    """past_key_values go on in the open segment; what they have read can be asked for at any time."""
    model, ids = awaken(stream(host, memory)), words(2, 3 * SEGMENT + 2)
    expected = model(ids).logits
    cache, parts, done = None, [], 0
    for size in (2, 1, 4, 1, 1, 7, 1):
        out = model(ids[:, done : done + size], past_key_values=cache, use_cache=True)
        parts.append(out.logits)
        done += size
        cache = out.past_key_values
        assert isinstance(cache, MemoryCache) and cache.get_seq_length() == done
        twin = copy.deepcopy(cache)
        assert twin.compute_state.__self__ is cache.compute_state.__self__
        state = model(ids[:, :done]).memory_state
        assert differences(twin.memory_state, state) < 1e-5
        assert out.get("memory_state") is None or differences(out.memory_state, state) < 1e-5
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-4, atol=1e-5)
    order = torch.tensor([1, 0])
    cache.reorder_cache(order)
    more = words(2, 1, 9)
    found = model(more, past_key_values=cache, use_cache=True).logits
    torch.testing.assert_close(found, model(torch.cat([ids[order], more], 1)).logits[:, -1:], rtol=1e-4, atol=1e-5)


def test_without_segment_length_a_call_is_one_segment() -> None:
    model = awaken(stream(GPT2, "grc_stream", None))
    ids = words(2, 17)
    torch.testing.assert_close(model(ids).logits, GPT2.build()(ids).logits)  # nothing is remembered yet
    state = model(ids).memory_state
    out = model.generate(
        ids[:, :2], memory_state=state, max_new_tokens=20, min_new_tokens=20, attention_mask=torch.ones(2, 2)
    )
    assert out.shape == (2, 22)


CALLS: list[tuple[str, Any, str]] = [
    ("rows", lambda m, i, s: m(i[:1], memory_state=s), "the state has 2 rows .*the segment 1"),
    ("other", lambda m, i, s: m(i, memory_state=(s.model,)), "the state is that of another model"),
    ("kind", lambda m, i, s: m(i, memory_state="state"), "state of type str must be"),
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
