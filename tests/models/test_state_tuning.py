"""State tuning: only the initial state of rows is trained."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from common import refuses
from integrations.hosts import library
from integrations.transformers_hosts import GPT2, SEGMENT, awaken, stream, words
from models.test_session import ours, theirs

import cached_transformers as ct
from cached_transformers.layers.initial_state import InitialState, initial_state_of
from cached_transformers.state import named_tensors, nbytes

models = pytest.mark.parametrize("make", [partial(ours, "grc_stream"), partial(theirs, "rmt")], ids=["ours", "theirs"])


def tune(model: Any) -> InitialState:
    return ct.tune_initial_state(model, words(1, 2 * SEGMENT, 9), segment_length=SEGMENT)


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    if hasattr(model, "config"):
        return model(ids, labels=ids).loss
    state, total = None, 0.0
    for piece in ids.split(SEGMENT, 1):
        out = model(piece, state)
        state = out.state
        total = total + out.outputs[:, :-1].flatten(0, 1).log_softmax(-1).gather(1, piece[:, 1:].reshape(-1, 1)).mean()
    return -total


@models
def test_it_alone_is_trained_and_lowers_the_loss(make: Callable[[], Any], tmp_path: Path) -> None:
    model, ids = make(), words(3, 3 * SEGMENT)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    plain = loss_of(model, ids).item()
    tuned = tune(model)
    first = loss_of(model, ids).item()
    own = [p for p in model.parameters() if p.requires_grad]
    assert own and {id(p) for p in own} == {id(p) for p in tuned.parameters()}
    optimizer = torch.optim.Adam(own, 0.1)
    for _ in range(12):
        optimizer.zero_grad()
        loss_of(model, ids).backward()
        optimizer.step()
    last = loss_of(model, ids).item()
    assert last < first - 1e-3
    assert all(torch.equal(model.state_dict()[name], t) for name, t in before.items())
    ct.save_initial_state(model, tmp_path / "tuned")
    assert (tmp_path / "tuned").stat().st_size < nbytes(tuned(1)) + 2000
    other = make()
    ct.load_initial_state(other, tmp_path / "tuned")
    torch.testing.assert_close(loss_of(other, ids).item(), last)
    ct.remove_initial_state(other)
    torch.testing.assert_close(loss_of(other, ids).item(), plain)


@models
def test_rows_that_begin_anew_begin_with_it(make: Callable[[], Any]) -> None:
    model, prompt = make(), words(2, 5)
    plain = ct.generate(model, prompt, tokens=6, temperature=0, segment_length=SEGMENT)
    tuned = tune(model)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.normal_(0, 5, generator=torch.Generator().manual_seed(0))
    found = ct.generate(model, prompt, tokens=6, temperature=0, segment_length=SEGMENT)
    assert not torch.allclose(found.scores, plain.scores)
    copied = copy.deepcopy(model)
    again = ct.generate(copied, prompt, tokens=6, temperature=0, segment_length=SEGMENT)
    torch.testing.assert_close(again.scores, found.scores)


def test_a_reset_row_begins_with_it_and_loops_train_it() -> None:
    model = ours("grc_stream")
    tuned = tune(model)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.mul_(-2)
    ids, far = words(2, SEGMENT), model(words(2, SEGMENT, 1), None).state
    out = model(ids, far, torch.tensor([True, False])).outputs
    fresh = model(ids).outputs
    torch.testing.assert_close(out[0], fresh[0])
    assert not torch.allclose(out[1], fresh[1])
    loop = ct.SegmentLoop(model, SEGMENT)
    loop(words(2, 2 * SEGMENT), words(2, 2 * SEGMENT, 1))[0].backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in tuned.parameters())


@pytest.mark.parametrize("memory", ["transformer_xl", "rmt", "grc_stream", "compressive"])
def test_it_begins_as_what_the_text_left(memory: str) -> None:
    model, ids, state = ours(memory), words(1, SEGMENT, 1), None
    for piece in words(1, 2 * SEGMENT, 9).split(SEGMENT, 1):
        state = model(piece, state).state
    expected = model(ids, state).outputs
    tuned = tune(model)
    torch.testing.assert_close(model(ids).outputs, expected)
    assert all(t.is_floating_point() for _, t in _learned(tuned))


def _learned(tuned: Any) -> list[tuple[str, torch.Tensor]]:
    named = list(named_tensors(tuned(1)))
    return [named[int(name.rsplit("_", 1)[1])] for name, _ in tuned.named_parameters()]


def test_refusals(tmp_path: Path) -> None:
    refuses("Linear carries no state", tune, torch.nn.Linear(2, 2))
    model = ours("grc_stream")
    refuses("has no initial state of its own", ct.save_initial_state, model, tmp_path / "a")
    refuses("one row of token ids", ct.tune_initial_state, model, words(2, 3))
    assert all(p.requires_grad for p in model.parameters())
    tune(model)
    assert initial_state_of(model.stack) is not None
    refuses("has an initial state already", tune, model)
    ct.save_initial_state(model, tmp_path / "a")
    other = ours("grc_stream")
    with torch.no_grad():
        other.head.weight[0] += 1
    refuses("other weights", ct.load_initial_state, other, tmp_path / "a")
    stranger = awaken(stream(GPT2, "grc_stream"))
    refuses(r"other weights", ct.load_initial_state, stranger, tmp_path / "a")


def test_it_travels_with_a_host_and_goes_with_its_memory(tmp_path: Path) -> None:
    model, ids = theirs(), words(2, 3 * SEGMENT)
    plain, keys = model(ids).logits, set(model.state_dict())
    tuned = tune(model)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.mul_(-3)
    expected = model(ids).logits
    assert (expected - plain).abs().max() > 1e-3
    model.save_pretrained(tmp_path)
    again = ct.load_pretrained(str(tmp_path))
    assert torch.equal(again(ids).logits, expected)
    assert set(again.state_dict()) == set(model.state_dict())
    ct.remove_memory(model)
    assert {name for name in keys if "memory." not in name} == set(model.state_dict())


def test_a_model_of_peft_is_read_with_its_adapters() -> None:
    peft = library("peft")
    model, ids = theirs("grc_stream"), words(1, 3 * SEGMENT)
    lora = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, modules_to_save=["memory"])
    adapted = peft.get_peft_model(model, lora).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    session = ct.Session(adapted)
    session.read(ids)
    expected = adapted.generate(input_ids=ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert torch.equal(session.generate(tokens=6, temperature=0).tokens, expected[:, ids.shape[1] :])
    prompted = peft.get_peft_model(theirs(), peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    refuses("PeftModelForCausalLM", ct.Session, prompted)
