"""Memories that a user registered, in GPT-2 and Llama: in the layers, round the segments, and both at once."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from common import refuses
from contract.outside_memory import OutsideInfini
from integrations import transformers_hosts as T
from integrations.transformers_hosts import Architecture, architectures, awaken, differences, stream, words
from torch import Tensor, nn

from cached_transformers import add_memory
from cached_transformers.integrations.memory_hooks import run_host
from cached_transformers.integrations.segment_context import SegmentContext
from cached_transformers.interfaces.memory import BlockRunner, Entry, LayerMemory, ModelMemory, Tokens, Trace
from cached_transformers.registry import MEMORIES
from cached_transformers.state import State

FRONT, BEHIND = 2, 1


class OutsideTokens(ModelMemory):
    """What stands in front is carried from what stands behind; the last front token is hidden from the segment.

    Each layer has a memory of its own, too.
    """

    needs = frozenset({"state", "tokens_round", "bias"})
    extra_tokens = FRONT + BEHIND

    def __init__(self, width: int, heads: int, place: bool = True, loss: float = 0.0) -> None:
        super().__init__()
        self.width, self.heads, self.place, self.loss = width, heads, place, loss
        self.vector_D = nn.Parameter(torch.randn(width))

    def layer_memory(self, index: int) -> LayerMemory:
        return OutsideInfini(self.width, self.heads)

    def init_state(self, batch_size: int, like: Tensor) -> State:
        return (like.new_zeros(batch_size, self.width),)

    def enter(self, state: State, tokens: Tokens) -> Entry:
        x_BND, places_BN1, padding_BN = tokens[:3]
        n = x_BND.shape[1]
        vector_B1D = self.vector_D.expand(len(x_BND), 1, -1)
        x_BLD = torch.cat([state[0][:, None] + vector_B1D, vector_B1D, x_BND, -vector_B1D], 1)
        ahead_BF1 = places_BN1[:, :1] + torch.arange(-FRONT, 0)[:, None]
        last_B11 = places_BN1 if padding_BN is None else places_BN1.masked_fill(padding_BN[..., None], 0)
        places_BL1 = torch.cat([ahead_BF1, places_BN1, last_B11.amax(1, keepdim=True) + 1], 1)
        if padding_BN is not None:
            padding_BN = nn.functional.pad(padding_BN, (FRONT, BEHIND), value=False)
        visible_LL = torch.ones(FRONT + n + BEHIND, FRONT + n + BEHIND, dtype=torch.bool).tril()
        visible_LL[FRONT : FRONT + n, FRONT - 1] = False
        segment = (FRONT, n) if self.place else None
        return Entry(Tokens(x_BLD, places_BL1, padding_BN), segment=segment, visible_NN=visible_LL)

    def exit(self, state: State, x_BND: Tensor, traces: Sequence[Trace]) -> tuple[Tensor, State, Tensor | None]:
        n = x_BND.shape[1] - FRONT - BEHIND
        assert traces[0].x_BND.shape[1] == traces[0].y_BND.shape[1] == x_BND.shape[1]
        loss = self.loss * self.vector_D.sum() if self.loss else None
        return x_BND[:, FRONT : FRONT + n], (x_BND[:, -1],), loss


class OutsideTwice(OutsideTokens):
    """Goes through the blocks twice; the first time is a preview."""

    def run(self, state: State, tokens: Tokens, through: BlockRunner) -> tuple[list[Tensor], State, Tensor | None]:
        state = self.exit(state, *through(self.enter(state, tokens), write=False))[1]
        return super().run(state, tokens, through)


class Windowed(OutsideInfini):
    """Would need a mask in its layer."""

    def window(self) -> int:
        return 3


class Selfish(OutsideInfini):
    """Is trained by a loss of its own."""

    def write(self, state: Any, trace: Trace) -> tuple[Any, Tensor]:  # type: ignore[override]
        return super().write(state, trace)[0], self.gate_H.sum()


NAMES = {"outside_tokens": OutsideTokens, "outside_twice": OutsideTwice}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MEMORIES, "_entries", dict(MEMORIES._entries))
    for name, kind in {**NAMES, "windowed": Windowed, "selfish": Selfish}.items():
        MEMORIES.register(name)(kind)


def with_tokens(host: Architecture, name: str, **options: Any) -> Any:
    return awaken(add_memory(host.build(), name, segment_length=T.SEGMENT, **options))


@architectures(T.DECODERS)
def test_tokens_round_a_segment_and_layers_with_a_memory_are_the_host_by_hand(host: Architecture) -> None:
    """The host's own code on the longer segment, with the layers' part by a second model that has that alone."""
    model = with_tokens(host, "outside_tokens")
    # Its layers write all that is not marked as padding.
    twin = add_memory(host.build(), "outside_infini", segment_length=None)
    state = {key: value for key, value in model.state_dict().items() if "vector_D" not in key}
    twin.load_state_dict(state)
    vector_D, ids = model.base_model.memory.vector_D, words(2, 3 * T.SEGMENT)
    found, carried, expected, layers = model(ids), torch.zeros(2, 16), [], None
    for piece in ids.split(T.SEGMENT, 1):
        one = vector_D.expand(2, 1, -1)
        x = torch.cat([carried[:, None] + one, one, twin.get_input_embeddings()(piece), -one], 1)
        sees = torch.ones(8, 8, dtype=torch.bool).tril()
        sees[FRONT:-BEHIND, 1] = False
        added = torch.zeros(2, 1, 8, 8).masked_fill(~sees, torch.finfo(torch.float32).min)
        reader = twin.base_model.segment_reader
        layers = layers if layers is not None else reader.init_state(2).layers
        out, layers = surrounded(reader, x, added, layers)
        carried = out[:, -1]
        expected.append(twin.lm_head(out[:, FRONT:-BEHIND]))
    torch.testing.assert_close(found.logits, torch.cat(expected, 1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.memory_state.model[0], carried, rtol=1e-4, atol=1e-5)
    assert differences(found.memory_state.layers, layers) < 1e-3
    hidden = model(ids, output_hidden_states=True).hidden_states
    assert [h.shape[1] for h in hidden] == [3 * T.SEGMENT] * 3


def surrounded(reader: Any, x: Tensor, mask: Tensor, layers: Any) -> tuple[Tensor, Any]:
    """The decoder's own forward on these tokens; the layer memories write what is between those of the memory."""
    places = torch.arange(x.shape[1])[None, :, None]
    context = SegmentContext(layers, places, torch.zeros(1, 1, dtype=torch.long), segment=(FRONT, T.SEGMENT))
    out = run_host(context, reader.hooks, reader.body, inputs_embeds=x, attention_mask=mask, use_cache=False)
    return out.last_hidden_state, tuple(context.states_after)


@architectures(T.DECODERS)
@pytest.mark.parametrize("name", list(NAMES))
def test_padding_behind_a_row(host: Architecture, name: str) -> None:
    model, ids, length = with_tokens(host, name), words(2, 3 * T.SEGMENT), T.SEGMENT + 2
    mask = torch.ones_like(ids)
    mask[1, length:] = 0
    alone, whole = model(ids[1:, :length]).logits, model(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(whole[1:, :length], alone, rtol=1e-4, atol=1e-5)


@architectures(T.DECODERS)
def test_two_ways_through_the_blocks_are_not_one(host: Architecture) -> None:
    once, twice = (with_tokens(host, name) for name in NAMES)
    twice.load_state_dict(once.state_dict())
    ids = words(2, T.SEGMENT)
    assert (once(ids).logits - twice(ids).logits).abs().max() > 1e-4


@architectures(T.DECODERS)
def test_a_memory_transformer_is_a_learned_prefix(host: Architecture) -> None:
    plain, model = host.build(), awaken(add_memory(host.build(), "memory_transformer", length=3))
    ids = words(2, T.SEGMENT)
    x = torch.cat([model.base_model.memory.initial_MD.expand(2, -1, -1), plain.get_input_embeddings()(ids)], 1)
    sees = torch.ones(3 + T.SEGMENT, 3 + T.SEGMENT, dtype=torch.bool).tril()
    sees[:3, :3] = True
    mask = torch.zeros(2, 1, *sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
    expected = plain(inputs_embeds=x, attention_mask=mask).logits[:, 3:]
    found = model(ids)
    torch.testing.assert_close(found.logits, expected, rtol=1e-4, atol=1e-5)
    assert (found.logits - plain(ids).logits).abs().max() > 1e-3


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("windowed", {}, r"the window of memory 'windowed' needs bias .*, which GPT2LMHeadModel does not give"),
        ("outside_tokens", {"place": False}, r"OutsideTokens makes 4 tokens of a segment of 1 .*Entry.segment="),
        ("outside_tokens", {"segment_length": 62}, r"segment_length=62 and 3 memory tokens: 65 .*64"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_added(name: str, options: dict[str, Any], message: str) -> None:
    model = T.GPT2.build()
    refuses(message, add_memory, model, name, **options)
    assert add_memory(model, "grc_stream", segment_length=T.SEGMENT) is model  # nothing of it stayed


@pytest.mark.parametrize("name, options", [("selfish", {}), ("outside_tokens", {"loss": 1.0})])
def test_a_loss_of_the_memory_s_own_is_not_lost(name: str, options: dict[str, Any]) -> None:
    model, ids = add_memory(T.GPT2.build(), name, segment_length=None, **options).train(), words(2, T.SEGMENT)
    refuses("is trained with an auxiliary loss", model, ids)
    model.eval()(ids)


EXPORTS = [(T.GPT2, "grc_stream", True), (T.LLAMA, "grc_stream", False), (T.GPT2, "rmt", False)]
MORE = [(host, memory, strict) for host in T.DECODERS for memory in T.STREAMS for strict in (False, True)]


@pytest.mark.parametrize(
    "host, memory, strict",
    [*EXPORTS, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE if case not in EXPORTS)],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::UserWarning")
@torch.no_grad()
def test_exported_it_computes_the_same(host: Architecture, memory: str, strict: bool) -> None:
    model, ids = awaken(stream(host, memory)), words(2, T.SEGMENT)
    state = model.init_memory_state(2)
    # No call goes before: classes of outputs that are made while a graph is traced would be unknown to it.
    program = torch.export.export(model, (ids,), {"memory_state": state, "use_cache": False}, strict=strict)
    run = program.module()
    for seed in range(3):
        found, expected = (m(words(2, T.SEGMENT, seed), memory_state=state, use_cache=False) for m in (run, model))
        torch.testing.assert_close(found.logits, expected.logits)
        assert differences(found.memory_state, expected.memory_state) < 1e-5
        state = expected.memory_state


def test_an_output_with_a_state_is_the_host_s_and_can_be_pickled() -> None:
    model, ids = stream(T.GPT2, "grc_stream"), words(2, T.SEGMENT)
    out = model(ids)
    assert isinstance(out, type(T.GPT2.build()(ids))) and list(out)[-1] == "memory_state"
    again = pickle.loads(pickle.dumps(out))
    assert type(again) is type(out) and torch.equal(again.logits, out.logits)
    assert differences(again.memory_state, out.memory_state) == 0
