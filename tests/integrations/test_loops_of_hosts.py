"""A decoder of transformers with a memory, in the loops of this package: as it is, or as a model of theirs."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from common import refuses
from integrations import transformers_hosts as T
from integrations.transformers_hosts import Architecture, architectures, awaken, by_hand, differences, stream, words
from torch import nn
from torch.nn import functional as F

from cached_transformers import ReplayLoop, SegmentLoop, create_model, generate, read_stream, remove_memory
from cached_transformers.state import last_use, map_state

some = pytest.mark.parametrize("memory", ["grc_stream", "memorizing", "rmt"])


@architectures(T.DECODERS)
@some
@pytest.mark.parametrize("kind", [SegmentLoop, ReplayLoop])
@pytest.mark.parametrize("length", [None, T.SEGMENT])
def test_a_loop_takes_a_host_as_it_is(host: Architecture, memory: str, kind: type[SegmentLoop], length: Any) -> None:
    model, ids = awaken(stream(host, memory, length)), words(2, 3 * T.SEGMENT + 1)
    loss, state = kind(model, T.SEGMENT, bptt=3)(ids[:, :-1], ids[:, 1:])
    loss.backward()
    logits, after = by_hand(model, ids[:, :-1])
    torch.testing.assert_close(loss, F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))
    assert differences(state, after) < 1e-5
    assert all(p.grad is not None for n, p in model.named_parameters() if "memory." in n)


def test_a_host_that_is_read_in_place_gives_the_same_numbers() -> None:
    """And what `generate` goes on with keeps the state that its open segment began with."""
    model, text = awaken(stream(T.GPT2, "memorizing")), words(1, 4 * T.SEGMENT + 3)[0].tolist()
    plain, quick = (list(read_stream(model, [text], T.SEGMENT, in_place=in_place)) for in_place in (False, True))
    for a, b in zip(plain, quick, strict=True):
        assert a[:5] == b[:5]
    assert differences(plain[-1].state, quick[-1].state) == 0
    state = plain[2].state
    before = map_state(torch.clone, state)
    with torch.no_grad(), last_use(state):
        model(words(1, 2), memory_state=state, use_cache=True)
    assert differences(state, before) == 0
    with torch.no_grad(), last_use(state):
        model(words(1, 2), memory_state=state, use_cache=False)
    assert differences(state, before) > 0


@some
def test_reading_generating_and_a_host_that_is_given_by_name(memory: str) -> None:
    model, ids = awaken(stream(T.GPT2, memory)), words(2, 3 * T.SEGMENT + 1)
    ours = create_model("transformers", model=model)
    assert ours.model is model and not ours.training and ours.vocabulary == model.config.vocab_size
    for host in (model, ours):
        now = list(read_stream(host, [ids[0].tolist()], T.SEGMENT))[-1]
        logits = by_hand(model, ids[:1, :-1])[0]
        expected = F.cross_entropy(logits[0], ids[0, 1:], reduction="sum").item()
        assert now.tokens == 3 * T.SEGMENT and abs(now.nats - expected) < 1e-3
        found = generate(host, ids, tokens=6, temperature=0, segment_length=T.SEGMENT)
        theirs = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, min_new_tokens=6, do_sample=False
        )
        assert torch.equal(found.tokens, theirs[:, ids.shape[1] :])
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        wrapped = create_model("transformers", model=again)
        assert SegmentLoop(again, T.SEGMENT).model.model is again is wrapped.model
    assert "for_loops" not in vars(remove_memory(model))


def test_a_host_with_a_new_memory_or_none() -> None:
    plain, ids = T.GPT2.build(), words(2, 11)
    ours = create_model("transformers", model=plain, memory={"name": "rmt", "length": 3})
    assert ours(ids).state.model.tokens_BMD.shape == (2, 3, 16)
    alone = create_model("transformers", model=T.GPT2.build())
    assert alone(ids).state == () and torch.equal(alone(ids).outputs, T.GPT2.build()(ids).logits)


@pytest.mark.parametrize("use", [lambda m: SegmentLoop(m, 5), lambda m: list(read_stream(m, [[1, 2]], 5)), None])
def test_a_host_without_a_memory_is_refused_with_the_way_out(use: Any) -> None:
    use = use or (lambda m: generate(m, words(1, 3), tokens=2))
    refuses(r"HeadModel.*create_model.*'transformers'", use, T.GPT2.build())


def test_what_is_no_decoder_with_a_head_is_refused() -> None:
    for model in (T.GPT2.build("GPT2Model"), T.BART.build(), T.BERT.build()):
        refuses(rf"model={type(model).__name__} predicts no next tokens", create_model, "transformers", model=model)
    refuses("model=Linear", create_model, "transformers", model=nn.Linear(2, 2))
    refuses(r"model=GPT2LMHeadModel.*n_embd", create_model, "transformers", model=T.GPT2.build(), n_embd=4)
    refuses("leave out pretrained", create_model, "transformers", model=T.GPT2.build(), pretrained="gpt2")
