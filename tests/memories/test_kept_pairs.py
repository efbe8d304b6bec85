"""keep="kv": in evaluation a state holds keys and values in the place of hidden states, and the same is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common import refuses
from integrations.families import EIGHT, GROUPED, decoder, words
from memories import harness
from torch import Tensor

from cached_transformers import Session, add_memory, generate, read_stream, tune_initial_state
from cached_transformers import state as states
from cached_transformers.memories.parts.fifo_store import Pairs
from cached_transformers.models.segments import read_segments

ROWS, SEGMENT, VOCABULARY, WIDTH, DEPTH = 3, 6, 11, 16, 2
MEMORIES: dict[str, dict[str, Any]] = {
    "transformer_xl": {"name": "transformer_xl", "length": 8},
    "same_length": {"name": "transformer_xl", "length": 8, "same_length": True, "relative": False},
    "segatron": {"name": "segatron", "length": 8, "sentence_ends": (1, 4), "paragraph_ends": (2,)},
    "ernie_doc": {"name": "ernie_doc", "length": 5},
    "compressive": {"name": "compressive", "length": 5, "compressed": 3, "rate": 3},
    "streaming_llm": {"name": "streaming_llm", "length": 4, "sinks": 2},
    "tova": {"name": "tova", "length": 5},
    "most_used": {"name": "compressive", "length": 5, "compressed": 3, "rate": 3, "function": "most_used"},
}
every = pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES)


def build(memory: dict[str, Any], keep: str) -> Any:
    sizes = {"width": WIDTH, "heads": 2, "attention": "softmax"}
    return harness.build({**memory, "keep": keep}, scale=0.2, **sizes).float()


def segments(count: int) -> tuple[Tensor, ...]:
    return harness.segments(count, ROWS, SEGMENT)


def pairs_of(state: Any) -> list[Pairs]:
    """All of them in a state."""
    if isinstance(state, Pairs):
        return [state]
    return [] if isinstance(state, Tensor) else [found for part in state for found in pairs_of(part)]


@every
def test_what_is_read_does_not_depend_on_what_is_kept(memory: dict[str, Any]) -> None:
    """Over segments of several lengths, with padding in all places, and rows that begin anew."""
    inputs = [*segments(7), segments(1)[0][:, :4]]
    resets = [None, None, torch.tensor([True, False, False]), None, None, torch.tensor([False, True, True])]
    generator = torch.Generator().manual_seed(1)
    paddings = [torch.rand(t.shape, generator=generator) < 0.25 if i % 2 else None for i, t in enumerate(inputs)]
    read = {}
    for keep in ("hidden", "kv"):
        model = build(memory, keep).eval()

        def one(index: int, state: Any, reset: Tensor | None, model: Any = model) -> Any:
            return model(inputs[index], state, reset, padding=paddings[index])

        with torch.no_grad():
            read[keep] = list(read_segments(one, range(len(inputs)), None, resets))
        assert bool(pairs_of(read[keep][-1].state)) == (keep == "kv")
    for index, (a, b) in enumerate(zip(read["hidden"], read["kv"], strict=True)):
        real = slice(None) if paddings[index] is None else ~paddings[index]
        torch.testing.assert_close(a.outputs[real], b.outputs[real], rtol=0, atol=1e-5)


@every
def test_a_state_of_the_other_mode_is_refused(memory: dict[str, Any]) -> None:
    model, tokens = build(memory, "kv"), segments(1)[0]
    trained, read = model.train().init_state(ROWS), model.eval().init_state(ROWS)
    for mode, state in ((False, trained), (True, read)):
        refuses("as_kept", model.train(mode), tokens, state)
    layer = model.stack.blocks[0].attention
    with pytest.raises(ValueError, match="from which its projections learn nothing"):
        layer.memory.open(read.layers[0], torch.zeros(1, 1, 8), layer.project_kv)


@every
def test_what_training_left_is_converted(memory: dict[str, Any]) -> None:
    """It is then read as the hidden states are, and as what evaluation keeps from its beginning."""
    tokens, read = segments(4), {}
    for keep in ("hidden", "kv"):
        model = build(memory, keep)
        state = model(tokens[0]).state
        state = model(tokens[1], state).state
        refuses(r"training=True.* call eval\(\)", model.as_kept, state)
        state = model.eval().as_kept(state)
        assert bool(pairs_of(state)) == (keep == "kv")
        with torch.no_grad():
            outs = list(read_segments(lambda t, s, r, m=model: m(t, s), tokens[2:], state))
        read[keep] = torch.cat([out.outputs for out in outs], 1)
    torch.testing.assert_close(read["hidden"], read["kv"], rtol=0, atol=1e-5)
    assert states.signature(model.as_kept(outs[-1].state)) == states.signature(outs[-1].state)


def test_loops_begin_in_the_mode_in_which_they_read() -> None:
    """Whichever mode the model is in: the numbers are those of hidden states."""
    text, found = torch.cat(segments(4), 1)[:1], {}
    for keep in ("hidden", "kv"):
        model = build(MEMORIES["transformer_xl"], keep).train()
        session = Session(model, SEGMENT)
        session.read(text)
        assert bool(pairs_of(session.state)) == (keep == "kv") and model.training
        answer = generate(model, text, tokens=8, temperature=0, segment_length=SEGMENT)
        again = session.generate(tokens=8, temperature=0)
        tune_initial_state(model, text, segment_length=SEGMENT)
        tuned = generate(model, text, tokens=8, temperature=0, segment_length=SEGMENT)
        now = list(read_stream(model, [text[0].tolist()], SEGMENT, in_place=True))[-1]
        found[keep] = (answer.tokens.tolist(), again.tokens.tolist(), tuned.tokens.tolist(), round(now.nats, 3))
    assert found["hidden"] == found["kv"]


def test_what_does_not_fit_is_refused() -> None:
    for name in ("transformer_xl", "segatron", "ernie_doc", "compressive"):
        refuses("keep='none'", build, {"name": name}, "none")


@pytest.mark.parametrize("family", [decoder("llama", "Llama", **GROUPED), decoder("qwen3", "Qwen3", **EIGHT)])
@pytest.mark.parametrize("name", ["transformer_xl", "streaming_llm", "ernie_doc", "compressive"])
def test_a_decoder_with_grouped_keys_stores_each_once(family: Any, name: str) -> None:
    spec = {"name": name, "length": 3, "sinks": 2} | ({"function": "mean"} if name == "compressive" else {})
    found = []
    for keep in ("hidden", "kv"):
        model = add_memory(family.build().eval(), {**spec, "keep": keep}, segment_length=4)
        found.append(model(words(tokens=22)))
    torch.testing.assert_close(found[1].logits, found[0].logits, rtol=0, atol=1e-6)
    heads, width = model.config.num_key_value_heads, model.config.head_dim
    pairs = [t for path, t in states.named_tensors(found[1].memory_state) if path.endswith("pairs_BMW")]
    assert pairs and all(t.shape[-1] == 2 * heads * width for t in pairs)
