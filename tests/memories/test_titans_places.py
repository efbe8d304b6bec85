"""Titans in a layer: its slow twin at each place, tokens of a model memory, forgetting, stability; MAL.

Legend: B rows, N tokens, D model width."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from integrations.transformers_hosts import LLAMA
from memories.harness import (
    HEADS,
    ROWS,
    SEGMENT,
    VOCABULARY,
    WIDTH,
    build,
    paddings,
    run,
    same_as_twin,
    segments,
    slowly,
)
from memories.titans_twin import SlowTitans
from torch import Tensor, nn

from cached_transformers import add_memory, create_model
from cached_transformers import state as states
from cached_transformers.interfaces.incremental import read_segment
from cached_transformers.interfaces.memory import LayerMemory, Query, Reading, Trace
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.memories.parts.fast_weights import FastState
from cached_transformers.memories.titans.titans import Titans
from cached_transformers.models.generation import ReadsAgain
from cached_transformers.registry import MEMORIES

PLACED = [
    {},
    {"chunk": 2, "nets": 4, "gates": "stretched"},
    {"mix": "sum", "layers": 2, "expansion": 2, "chunk": 2, "activation": "gelu", "nets": 1},
    {"place": "context", "chunk": 2},
    {"place": "context", "persistent": 2, "layers": 2, "expansion": 2, "loss": "huber", "bound": 0.3},
    {"place": "layer", "chunk": 2},
    {"place": "layer", "mix": "alone", "layers": 2, "expansion": 2, "nets": 4},
    {"mix": "alone", "chunk": 3},
    {"window": 3, "chunk": 2},
    {"window": 4, "chunk": 2, "orthogonal": True, "place": "context", "gates": "stretched"},
]


@pytest.mark.parametrize(
    ("options", "padded"),
    [*((o, True) for o in PLACED), *((o, False) for o in [PLACED[0], PLACED[3], PLACED[5]])],
    ids=str,
)
def test_a_model_is_its_slow_twin_with_gradients(options: dict[str, Any], padded: bool) -> None:
    model = build({"name": "titans", **options})
    same_as_twin(model, slowly(model, SlowTitans), segments(3), paddings(3) if padded else [None] * 3)


@pytest.mark.parametrize("memory", [{"name": "titans", "layers": 2}, {"name": "ttt", "model": "mlp"}], ids=str)
def test_it_learns_without_recorded_gradients_as_it_does_in_training(memory: dict[str, Any]) -> None:
    model, after = build(memory), []
    for training, mode in ((True, torch.enable_grad), (False, torch.no_grad), (False, torch.inference_mode)):
        with mode():
            last = run(model.train(training), segments(3))[-1]
        after.append([t.detach().clone() for _, t in states.named_tensors(last.state)])
    for a, b, c in zip(*after, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_tokens_of_a_model_memory_read_and_write_nothing() -> None:
    """Those in front read what was there before the segment, those behind what is there when it ends."""
    memory = Titans(WIDTH, HEADS, chunk=2).double()
    x_BND = torch.randn(ROWS, 9, WIDTH, dtype=torch.float64)
    empty = memory.init_state(ROWS, x_BND)

    def write(reading: Reading, x_BND: Tensor) -> FastState:
        return memory.write(empty, Trace(x_BND, x_BND, Query(x_BND), reading))[0]

    alone = memory.read(empty, Query(x_BND[:, 2:6]))
    around = memory.read(empty, Query(x_BND, segment=(2, 4)))
    a, b = write(alone, x_BND[:, 2:6]), write(around, x_BND[:, 2:6])
    assert alone.output_BHNE is not None and around.output_BHNE is not None
    torch.testing.assert_close(around.output_BHNE[:, :, 2:6], alone.output_BHNE, rtol=0, atol=1e-12)
    for one, other in zip(a, b, strict=True):
        assert torch.equal(one, other)
    padding = torch.ones(ROWS, 3, dtype=torch.bool)  # what writes nothing reads what is there
    assert not around.output_BHNE[:, :, :2].any()  # the nets begin with 0
    later = memory.answer(memory.snapshot(a), memory.ask(a, Query(x_BND[:, 6:])))
    torch.testing.assert_close(around.output_BHNE[:, :, 6:], later, rtol=0, atol=1e-12)
    after = memory.read(a, Query(x_BND[:, 6:], padding_BN=padding)).carry
    assert torch.equal(after.weights_BGP, a.weights_BGP) and torch.equal(after.sums_BGP, a.sums_BGP)


@pytest.mark.parametrize("gates", ["sigmoid", "stretched"])
def test_half_is_forgotten_after_its_half_life(gates: str) -> None:
    memory = Titans(WIDTH, HEADS, half_life=64, gates=gates).double()  # type: ignore[arg-type]
    nn.init.zeros_(memory.gate.weight)
    kept = 1 - memory._gates(torch.randn(1, 64, WIDTH, dtype=torch.float64), None)[0].alpha_BGN
    torch.testing.assert_close(kept.prod(-1), torch.full_like(kept[..., 0], 0.5), rtol=1e-6, atol=0)


def test_gates_that_are_closed_keep_what_is_stored_to_the_last_bit() -> None:
    model = build({"name": "titans", "gates": "stretched"}).eval()
    state = model(segments(1)[0]).state
    for memory in model.stack.layer_memories():  # type: ignore[union-attr, operator]
        memory.gate.weight.data.zero_()
        memory.gate.bias.data.fill_(-9)  # momentum dies away within a few tokens
    kept = None
    for ids in segments(60):
        state = model(ids, state).state
        kept = state if kept is None or len(kept) == 0 else kept
    weights = [layer.weights_BGP for layer in state.layers]
    again = [layer.weights_BGP for layer in model(segments(1)[0], state).state.layers]
    assert all(torch.equal(a, b) and a.abs().max() > 1e-3 for a, b in zip(weights, again, strict=True))


def drive(tokens: int, dtype: torch.dtype, **options: Any) -> None:
    """Read tokens that repeat, of a length in the thousands, with all gates at their bounds."""
    torch.manual_seed(0)
    memory = Titans(WIDTH, HEADS, **options).to(dtype).eval()
    with torch.no_grad():
        memory.gate.weight.zero_()
        memory.gate.bias.copy_(torch.tensor([50.0, -50.0, 4.6]).repeat_interleave(memory.nets))  # eta = .99
        few_BND = 1000 * torch.randn(1, 3, WIDTH, dtype=dtype)
        x_BND = few_BND.repeat(1, 86, 1)[:, :256]
        state = memory.init_state(1, x_BND)
        for _ in range(tokens // 256):
            reading = memory.read(state, Query(x_BND))
            assert reading.output_BHNE is not None and reading.output_BHNE.isfinite().all()
            state = memory.write(state, Trace(x_BND, x_BND, Query(x_BND), reading))[0]
    assert state.weights_BGP.isfinite().all() and state.sums_BGP.isfinite().all()


HARD = [{}, {"chunk": 64}, {"chunk": 1}, {"layers": 2}, {"layers": 2, "chunk": 64, "rate": 64.0}, {"rate": 1000.0}]
HARD += [{"loss": "lp"}, {"loss": "lp", "layers": 2, "chunk": 64}]


@pytest.mark.parametrize("tokens", [4096, pytest.param(65536, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", HARD, ids=str)
def test_repeated_inputs_of_any_size_leave_it_finite(options: dict[str, Any], dtype: torch.dtype, tokens: int) -> None:
    drive(tokens, dtype, **options)


@pytest.mark.parametrize("chunk", [1, 16])
def test_a_matrix_with_the_largest_rate_learns_what_is_repeated_without_its_limit(chunk: int) -> None:
    """It does not only stay finite: its error goes to 0, so that no limit is what holds it."""
    memory = Titans(WIDTH, HEADS, chunk=chunk, limit=1e30).double()
    with torch.no_grad():
        memory.gate.weight.zero_()
        memory.gate.bias.copy_(torch.tensor([50.0, -50.0, 2.2]).repeat_interleave(memory.nets))
        x_BND = torch.randn(1, 2, WIDTH, dtype=torch.float64).repeat(1, 128, 1)
        memory.query.weight.copy_(memory.key.weight)
        state = memory.init_state(1, x_BND)
        for _ in range(40):
            reading = memory.read(state, Query(x_BND))
            state = memory.write(state, Trace(x_BND, x_BND, Query(x_BND), reading))[0]
        assert reading.output_BHNE is not None
        read_BND = reading.output_BHNE.transpose(1, 2).flatten(2)
        torch.testing.assert_close(read_BND[:, -2:], nn.functional.silu(memory.value(x_BND[:, -2:])), rtol=0, atol=1e-4)


MAL: dict[str, Any] = {"name": "titans", "place": "layer", "chunk": 2}
WINDOW: dict[str, Any] = {"name": "transformer_xl", "length": 4}


@pytest.mark.parametrize("mix", ["sum", "product", "alone"])
def test_queries_keys_and_values_are_made_of_what_it_gives(mix: Any) -> None:
    memory, norm = Titans(WIDTH, HEADS, place="layer", mix=mix, chunk=2, initial_share=0.75), nn.LayerNorm(WIDTH)
    layer = SelfAttention(WIDTH, HEADS, memory=memory, norm=norm, causal=True).double()
    plain = SelfAttention(WIDTH, HEADS, causal=True).double()
    plain.load_state_dict({k: v for k, v in layer.state_dict().items() if k in plain.state_dict()})
    x_BND, state = torch.randn(ROWS, 7, WIDTH).double(), layer.init_state(ROWS, torch.zeros(()).double())
    read = read_segment(memory, state[0], Query(layer.norm(x_BND)), None).output_BHNE
    assert read is not None
    m_BND = (read / (read.square().mean(-1, keepdim=True) + 1e-5).sqrt()).transpose(1, 2).flatten(2)
    given_BND, y = layer.norm(x_BND), layer.norm(x_BND).unflatten(-1, (HEADS, -1))
    normed_BND = (y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(2)
    mixed = {"sum": given_BND + 0.75 * m_BND, "alone": 0.25 * given_BND + 0.75 * m_BND}
    mixed["product"] = 0.25 * given_BND + 0.75 * normed_BND * m_BND.sigmoid()
    torch.testing.assert_close(layer(x_BND, state=state).y_BND, plain(mixed[mix]).y_BND, rtol=0, atol=1e-12)


def test_the_memory_alone_leaves_nothing_of_attention() -> None:
    """mix="alone" behind attention with a full share is the neural memory by itself (LMM)."""
    model = build({"name": "titans", "mix": "alone"}, scale=0)
    out = model(segments(1)[0]).outputs
    for block in model.stack.blocks:  # type: ignore[union-attr]
        nn.init.normal_(block.attention.qkv.weight)
    assert torch.equal(model(segments(1)[0]).outputs, out)
    for block in model.stack.blocks:  # type: ignore[union-attr]
        nn.init.normal_(block.attention.memory.key.weight)
    assert (model(segments(1)[0]).outputs - out).abs().amax((0, 2)).min() > 1e-4


@pytest.mark.parametrize(("cut", "options"), [(2, {}), (4, {}), (6, {"window": 5}), (4, {"orthogonal": True})])
def test_cuts_at_multiples_of_its_chunk_change_nothing(cut: int, options: dict[str, Any]) -> None:
    """Of a stream whose attention goes on across them."""
    model = build(MAL | options, attention={"name": "delta_net", "carry": True}, positions="none")
    tokens_BN = torch.cat(segments(5), 1)[:, :24]
    parts = [out.outputs for out in run(model, tokens_BN.split(cut, 1))]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens_BN).outputs, rtol=0, atol=1e-9)


def test_kept_keys_and_hosts_with_projections_of_their_own() -> None:
    for order in (1, -1):
        with pytest.raises(ValueError, match=r"TransformerXL.*'hidden'"):
            build([{**WINDOW, "keep": "kv"}, MAL][::order])
    with pytest.raises(ValueError, match=r"'titans'.*in_front.*place='gate'"):
        add_memory(LLAMA.build(), {"name": "titans", "place": "layer"}, segment_length=8)


class Doubling(LayerMemory):
    """In front of attention: twice its input, and nothing remembered."""

    needs = frozenset({"in_front"})

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()

    def read(self, opened: Any, query: Query, project_kv: Any) -> Reading:
        return Reading(carry=query.x_BND)

    def combine(self, y_BHNE: Tensor, query: Query, reading: Reading) -> Tensor:
        assert torch.equal(reading.carry, query.x_BND)
        return 2 * y_BHNE

    def open(self, state: Any, first_B1P: Tensor | None, project_kv: Any) -> Any:
        return state


def test_a_memory_of_yours_stands_there_with_one_word_and_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that a token can be read alone, which the layer cannot: the open segment is read again, and said."""
    monkeypatch.setattr(MEMORIES, "_entries", dict(MEMORIES._entries))
    MEMORIES.register("doubling")(Doubling)
    torch.manual_seed(0)
    sizes = {"vocabulary": VOCABULARY, "width": WIDTH, "depth": 2, "heads": HEADS, "feed_forward": 16}
    model = create_model("language_model", memory="doubling", **sizes).eval()
    plain = create_model("language_model", **sizes).eval()
    plain.load_state_dict(model.state_dict())
    for block in plain.stack.blocks:  # type: ignore[union-attr]
        for parameter in block.attention.norm.parameters():
            parameter.data.mul_(2)
    prompt = segments(1)[0]
    with pytest.warns(ReadsAgain, match="memory Doubling"):
        found = model.generate(prompt, tokens=8, temperature=0, segment_length=SEGMENT)
    assert torch.equal(found.tokens, plain.generate(prompt, tokens=8, temperature=0, segment_length=SEGMENT).tokens)
