"""Memories with a state in GPT-2 and Llama: lengths of segments, generation, caches, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from common import refuses
from integrations.transformers_hosts import GPT2, LLAMA, awaken, differences, stream, words
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from cached_transformers import add_memory, load_pretrained

DynamicCache = pytest.importorskip("transformers").DynamicCache


def test_without_segment_length_a_call_is_one_segment(tmp_path: Any) -> None:
    model = awaken(stream(GPT2, "grc_stream", None))
    ids = words(2, 17)
    torch.testing.assert_close(model(ids).logits, GPT2.build()(ids).logits)  # nothing is remembered yet
    state = model(ids).memory_state
    out = model.generate(
        ids[:, :2], memory_state=state, max_new_tokens=20, min_new_tokens=20, attention_mask=torch.ones(2, 2)
    )
    assert out.shape == (2, 22)
    model.save_pretrained(tmp_path)
    assert load_pretrained(str(tmp_path)).transformer.segment_reader.segment_length is None


GREEDY: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
GREEDY |= {"return_dict_in_generate": True}


def same(found: Any, expected: Any, skipped: int = 0) -> None:
    assert torch.equal(found.sequences, expected.sequences[:, skipped:])
    assert differences(found.memory_state, expected.memory_state) < 1e-5


@pytest.mark.parametrize("memory", ["memorizing", "rmt"])
@pytest.mark.parametrize("beams", [1, 3])
def test_a_second_turn_reads_only_the_new_tokens(memory: str, beams: int) -> None:
    model, ids = awaken(stream(LLAMA, memory)), words(2, 6)
    own = DynamicCache()
    first, again = model.generate(ids, past_key_values=own, **GREEDY), model.generate(ids, **GREEDY)
    same(first, again)
    more = torch.cat([first.sequences, words(2, 3, 1)], 1)
    mask, options = torch.ones_like(more), {**GREEDY, "num_beams": beams}
    expected = model.generate(more, attention_mask=mask, **options)
    options["attention_mask"] = mask
    for cache in (own, copy.deepcopy(again.past_key_values)):
        same(model.generate(more, past_key_values=cache, **options), expected)
    read: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda _, args, out: read.append(args[0].shape[1]))
    cache = again.past_key_values
    del options["return_dict_in_generate"]  # its state is of a text that is read once more
    found = model.generate(more[:, cache.tokens :], past_key_values=cache, **{**options, "max_new_tokens": 1})
    assert torch.equal(found[:, 4:], expected.sequences[:, 16:17]) or beams > 1
    assert sum(read) == 2 + 4  # those of the partial segment, which is now full, and the new ones


@pytest.mark.parametrize("memory", ["grc_stream", "rmt"])
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "checkpointed"])
def test_prompts_as_embeddings(memory: str, training: bool) -> None:
    model, ids = awaken(stream(GPT2, memory)), words(2, 6)
    x, expected = model.get_input_embeddings()(ids), model.generate(ids, **GREEDY)
    if training:
        model.train().gradient_checkpointing_enable()
    same(model.generate(inputs_embeds=x, **GREEDY), expected, 6)
    same(model.generate(ids, inputs_embeds=x, **GREEDY), expected)


@pytest.mark.parametrize("memory", ["grc_stream", "rmt"])
@torch.no_grad()
def test_a_segment_of_embeddings_goes_on_with_ids_and_ids_with_embeddings(memory: str) -> None:
    model, ids = awaken(stream(GPT2, memory)), words(2, 9)
    both = {"input_ids": ids, "inputs_embeds": model.get_input_embeddings()(ids)}
    expected, cache = model(ids), DynamicCache()
    for begins, follows in (list(both), list(both)[::-1], ["input_ids"] * 2):
        kept = None if begins != follows else cache  # one of the caller's becomes the text
        out = model(**{begins: both[begins][:, :3]}, past_key_values=kept, use_cache=True)
        out = model(**{follows: both[follows][:, 3:]}, past_key_values=kept or out.past_key_values)
        torch.testing.assert_close(out.logits, expected.logits[:, 3:], rtol=1e-5, atol=1e-5)
        assert differences(out.past_key_values.memory_state, expected.memory_state) < 1e-5


def test_a_compiled_forward_generates_without_compiling_again() -> None:
    counter, model, ids = CompileCounter(), awaken(stream(GPT2, "grc_stream")), words(2, 6)
    expected = model.generate(ids, **GREEDY)
    model.forward = torch.compile(model.forward, backend=counter)
    same(model.generate(ids, **GREEDY), expected)
    assert counter.frame_count <= 2  # the prompt, and a token


def test_a_compiled_forward_without_a_cache_compiles_for_all_lengths() -> None:
    counter, model, ids, counts = CompileCounter(), awaken(stream(GPT2, "grc_stream")), words(2, 6), []
    given = GREEDY | {"use_cache": False, "return_dict_in_generate": False}
    calls = [given | {"max_new_tokens": tokens} for tokens in (11, 23)]
    expected = [model.generate(ids, **call) for call in calls]
    model.forward = torch.compile(model.forward, backend=counter)
    for call, tokens in zip(calls, expected, strict=True):
        assert torch.equal(model.generate(ids, **call), tokens)
        counts.append(counter.frame_count)
    assert counts[0] == counts[1] <= 9


CALLS: list[tuple[str, Any, str]] = [
    ("attentions", lambda m, i, s: m(i, output_attentions=True), "output_attentions=True: .*remove_memory"),
    ("mask", lambda m, i, s: m(i, attention_mask=torch.ones(2, 1, 4, 4)), r"shape \(2, 1, 4, 4\): .*\(2, 4\)"),
    ("mask of all", lambda m, i, s: m(i, attention_mask=torch.ones(2, 9)), r"shape \(2, 9\): .* = \(2, 4\)"),
    ("nothing", lambda m, i, s: m(), "give either input_ids or inputs_embeds"),
    ("assisted", lambda m, i, s: m.generate(i[:1], prompt_lookup_num_tokens=2), "prompt_lookup_num_tokens: "),
    ("assistant", lambda m, i, s: m.generate(i[:1], assistant_model=m, max_new_tokens=4), "assistant_model: "),
    ("contrastive", lambda m, i, s: m.generate(i, penalty_alpha=0.6, top_k=4), "penalty_alpha: "),
    ("layers", lambda m, i, s: m.generate(i, dola_layers="high"), "dola_layers: "),
    ("static", lambda m, i, s: m.generate(i, cache_implementation="static"), "'static': .*'dynamic'"),
    ("offloaded", lambda m, i, s: m.generate(i, cache_implementation="offloaded"), "'offloaded': .*'dynamic'"),
    ("nothing new", lambda m, i, s: m.generate(i, past_key_values=cache_of(m, i)), "hold 4 tokens, .* of 4 "),
    ("other text", lambda m, i, s: m.generate(words(2, 9, 5), past_key_values=cache_of(m, i)), "past_key_values"),
    ("use_cache", lambda m, i, s: m.generate(i, past_key_values=cache_of(m, i), use_cache=False), "use_cache=False"),
    ("hidden", lambda m, i, s: after(m, i, attention_mask=torch.ones(2, 8).tril(2)), "attention_mask: 0 at a token"),
    ("types", lambda m, i, s: after(m, i, token_type_ids=torch.zeros_like(i)), "token_type_ids: "),
]


def cache_of(model: Any, ids: Tensor) -> Any:
    return model(ids, use_cache=True).past_key_values


def after(model: Any, ids: Tensor, **call: Any) -> Any:
    return model(ids, past_key_values=cache_of(model, ids), **call)


@pytest.mark.parametrize("name, call, message", CALLS, ids=[c[0] for c in CALLS])
def test_calls_that_a_memory_cannot_follow_are_refused(name: str, call: Any, message: str) -> None:
    model, ids = stream(GPT2, "grc_stream"), words(2, 4)
    state = model(ids).memory_state
    refuses(message, call, model, ids, state)
    assert model(ids).logits.isfinite().all()  # and goes on


def test_caches_of_others_are_refused() -> None:
    plain, model, ids = GPT2.build(), stream(GPT2, "grc_stream"), words(2, 4)
    with pytest.raises(ValueError, match=r"were not made by this model with its memory"):
        model(ids, past_key_values=plain(ids, use_cache=True).past_key_values)
    out = model(ids, use_cache=True)
    refuses("memory_state", model, ids[:, :1], past_key_values=out.past_key_values, memory_state=out.memory_state)
    refuses("past_key_values", model, ids[:1, :1], past_key_values=out.past_key_values)
    refuses(r"called without its state", model.transformer.h[0].attn, torch.zeros(1, 3, 16))
    with pytest.raises(ValueError, match=r"'rmt'.*implementation='flex_attention'.*'sdpa'"):
        other = LLAMA.build()
        other.config._attn_implementation = "flex_attention"
        add_memory(other, "rmt")
    with pytest.raises(ValueError, match=r"have no type"):
        stream(GPT2, "rmt")(ids, token_type_ids=torch.zeros_like(ids))
