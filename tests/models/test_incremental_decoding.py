"""Incremental decoding equals reading the partial segment again, for every memory and attention that supports it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from attentions.cases import CASES
from common import refuses, stirred
from contract.contract_cases import attention_spec
from contract.contracts import CONTRACTS
from torch import Tensor
from torch.ao.quantization import quantize_dynamic

from cached_lab.experiments.probes.settings import stream_memories
from cached_transformers import positions
from cached_transformers.interfaces.memory import (
    Context,
    Entry,
    LayerMemory,
    ModelMemory,
    ProjectKV,
    Query,
    Reading,
    Tokens,
)
from cached_transformers.layers.incremental_decoding import why_in_one_piece
from cached_transformers.memories import segatron
from cached_transformers.models import LanguageModel
from cached_transformers.models.generation import GeneratedText, ReadsAgain, generate
from cached_transformers.registry import ATTENTIONS, MEMORIES

V, SEGMENT, BEAMS = 11, 6, 3
Spec = Any

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "transformer_xl": [{"length": 7}, {"length": 7, "same_length": True}, {"length": 7, "relative": False}],
    "streaming_llm": [{"length": 5, "sinks": 2}],
    "expire_span": [{"length": 9, "ramp": 4}, {"length": 5, "longest": 20, "ramp": 6, "evict": True, "clamp": 3}],
    "compressive": [
        {"length": 4, "compressed": 3, "rate": 2},
        *({"length": 4, "compressed": 3, "positions": "age", "clamp": clamp} for clamp in (None, 2)),
    ],
    "segatron": [
        {"length": 7, "sentence_ends": [1, 2, 3], "paragraph_ends": [4]},
        {"length": 7, "sentence_ends": [1, 2, 3], "clamp": 3},
    ],
    "ernie_doc": [{"length": 7}, {"length": 7, "longest": SEGMENT}, {"length": 7, "start": "zeros"}],
    "infinity_former": [{"length": 4, "chunk": 3, "basis": 8}],
    "crtn": [{"segment": SEGMENT}, {"segment": SEGMENT, "query": "compute_first", "short_memory": 1}],
    "block_retrieval": [
        {"sinks": 2, "recent": 4, "block": 3, "topk": 2},
        {"recent": 3, "block": 2, "topk": 1, "capacity": 4, "vote": "layer", "places": "same"},
    ],
    "grc_stream": [{"length": 5}, {"length": 5, "ratio": 1.0}],
    "memorizing": [{"length": 9, "k": 4}, {"length": 9, "k": 4, "joint": True}],
    "infini": [{}, {"update": "exact", "first": "gated"}],
    "lact": [{"rate": 0.1}, {"muon": True, "momentum": True, "keep": "sum", "first": "apply"}],
    "titans": [{"chunk": 3}, {"chunk": 16, "layers": 2, "mix": "sum"}, {"chunk": 1, "mix": "alone"}],
    "ttt": [{"mini_batch": 4}, {"model": "mlp", "mini_batch": 3, "rotary": False}],
    "memory_caching": [
        *({"over": "infini", "slots": 2, "read": read} for read in ("gated", "residual", "sparse")),
        {"over": {"name": "titans", "chunk": 3, "layers": 2}, "read": "soup", "slots": 2},
        {"over": {"name": "titans", "chunk": 3}, "slots": 2},
        {"over": {"name": "ttt", "mini_batch": 3}, "slots": 2, "start": "restart"},
    ],
    "rmt": [{"length": 3}, {"length": 3, "mask": "causal"}, {"length": 3, "cache": 5}],
    "memory_transformer": [{"length": 3}, {"length": 3, "control": True, "cache": 4}],
    "memformer": [{"length": 4}],
    "feedback": [{"length": 7}, {"length": 7, "keep": "kv", "shared_kv": False}, {"length": 7, "positions": None}],
    "read_twice": [{"slots": 4}, {"slots": 4, "attention": "joint"}, {"slots": 4, "clip": 2, "top_k": 2}],
}
"""Options for short segments, of the memories of causal models."""
SPECS: list[Spec] = [
    None,
    *({"name": name, **options} for name, rows in OPTIONS.items() for options in rows),
    [{"name": "grc_stream", "length": 5}, {"name": "transformer_xl", "length": 7}],
    [{"name": "rmt", "length": 3}, {"name": "grc_stream", "length": 5}],
    [{"name": "rmt", "length": 3}, {"name": "titans", "chunk": 4}],
    [{"name": "memformer", "length": 3}, {"name": "ttt", "mini_batch": 4}],
    [{"name": "transformer_xl", "length": 4}, {"name": "expire_span", "length": 9, "ramp": 4}],
    [{"name": "transformer_xl", "length": 4}, {"name": "compressive", "length": 4, "compressed": 2}],
]
CORES: list[Spec] = [
    *("linear", "performer", "rfa", "delta_net", "gated_delta"),
    {"name": "linear", "carry": True},
    {"name": "delta_net", "carry": True},
    {"name": "gated_delta", "carry": True},
    *({"name": "gated_delta", "preset": preset, "carry": True} for preset in ("kda", "retnet", "mamba2")),
    {"name": "longformer", "window": 4},
    {"name": "longformer", "window": 2, "dilation": [1, 3], "global_tokens": [1]},
    {"name": "sparse_transformer", "stride": 3},
    {"name": "sparse_transformer", "stride": 3, "combine": "layers"},
    {"name": "sparse_transformer", "stride": 4, "pattern": "fixed", "summary": 1, "slices": 2, "combine": "heads"},
    {"name": "sparse_transformer", "stride": 4, "pattern": "fixed", "summary": 1, "slices": 2},
    {"name": "image_transformer", "block": 3, "memory": 2},
    {"name": "axial", "columns": 3},
    {"name": "bigbird", "block": 2, "random": 1},
]
AGAIN = {"bp_transformer", "etc", "memory_compressed", "reformer", "routing", "sac", "sinkhorn", "star"}
"""Causal attentions without a form for single tokens."""


def build(memory: Spec = None, attention: Spec = "softmax", **options: Any) -> LanguageModel:
    torch.manual_seed(3)
    model = LanguageModel(V, 16, 2, 2, 16, memory=memory, attention=attention, **options).double().eval()
    return stirred(model, 0.1)


def name_of(spec: Spec) -> str:
    if not isinstance(spec, dict):
        return str(spec)
    return spec["name"] + "".join(f",{k}={v}" for k, v in spec.items() if k != "name")


def choice(step: int, rows: int) -> Tensor:
    """Continuations of each row."""
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randint(BEAMS, (rows, BEAMS), generator=generator)
    return (torch.arange(rows)[:, None] * BEAMS + drawn).flatten()


@torch.no_grad()
def compare(model: LanguageModel, segment: int | None = SEGMENT, steps: int = 17, tolerance: float = 1e-10) -> None:
    """Two texts of two rows; in the midst of a segment each becomes three continuations, and later a row vanishes."""
    prompt, state = torch.randint(V, (2, 9)), model.init_state(2)
    texts = [GeneratedText(model, prompt, state, segment, again=again) for again in (False, True)]
    assert texts[0].steps and not texts[1].steps
    rows = 2
    for step in range(steps):
        found, expected = (text.read() for text in texts)
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
        moves = {4: torch.arange(2).repeat_interleave(BEAMS), 12: torch.arange(BEAMS, 2 * BEAMS)}
        if step == 4:
            for text in texts:
                text.multiply(BEAMS)
        elif step == 12 or (step > 4 and step % 2):
            moves[step] = moves.get(step, choice(step, rows))
            rows = len(moves[step]) // BEAMS
            for text in texts:
                text.choose(moves[step])
        if step in moves:
            expected = expected[moves[step]]
        token = torch.multinomial(expected.exp(), 1)[:, 0]
        for text in texts:
            text.append(token)
    torch.testing.assert_close(*(text.after() for text in texts), rtol=0, atol=tolerance)


@pytest.mark.parametrize("memory", SPECS, ids=name_of)
def test_every_memory_reads_tokens_alone(memory: Spec) -> None:
    compare(build(memory))


@pytest.mark.parametrize("memory", [None, {"name": "transformer_xl", "length": 7, "relative": False}], ids=name_of)
@pytest.mark.parametrize("attention", CORES, ids=name_of)
def test_every_core_that_can_reads_tokens_alone(attention: Spec, memory: Spec) -> None:
    if memory is not None and isinstance(attention, dict) and attention.get("carry"):
        memory = {"name": "rmt", "length": 3, "mask": "causal"}  # such a core takes no context
    compare(build(memory, attention), segment=9, steps=14)


@pytest.mark.parametrize(
    "memory",
    [{"name": "transformer_xl", "length": 7, "keep": "kv"}, "grc_stream", {"name": "titans", "chunk": 4}],
    ids=name_of,
)
def test_quantised_and_adapted_layers_read_tokens_alone(memory: Spec) -> None:
    """A scale of all tokens together is another one of each alone, so that quantised activations differ in their last
    bits; adapters, merged or not, differ in nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = quantize_dynamic(build(memory).float(), {torch.nn.Linear}, dtype=torch.qint8)
        compare(quantised, tolerance=0.15)
        peft = pytest.importorskip("peft", reason="PEFT is not installed")
        adapters = peft.LoraConfig(r=2, target_modules=["qkv", "output"], init_lora_weights=False)
        adapted = peft.get_peft_model(build(memory), adapters).eval()
        compare(adapted)
        compare(adapted.merge_and_unload())


@pytest.mark.parametrize(
    ("memory", "most"),
    [
        ({"name": "transformer_xl", "length": 7}, 300),
        ({"name": "compressive", "length": 4, "compressed": 3, "positions": "age"}, 220),
        ({"name": "compressive", "length": 4, "compressed": 3, "positions": "age", "clamp": 2}, 200),
        ({"name": "segatron", "length": 7}, 900),
        ({"name": "ernie_doc", "length": 7, "longest": 50}, 450),
    ],
    ids=lambda given: name_of(given) if isinstance(given, dict) else "",
)
def test_codes_of_positions_are_made_once_for_a_segment(
    memory: Spec, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sines or projections of distances and places; made anew for each token they would be twice to twenty times as
    many."""
    model, made = build(memory), []
    for module in (positions, segatron):
        counted = lambda t, *more, was=module.angles: made.append(t.numel()) or was(t, *more)  # noqa: E731
        monkeypatch.setattr(module, "angles", counted)
    for block in model.stack.blocks if "longest" in memory else ():
        project = block.attention.positions.project
        project.register_forward_pre_hook(lambda linear, given: made.append(given[0].shape[-2]))
    state = model(torch.ones(1, 9, dtype=torch.long)).state
    made.clear()
    with torch.no_grad():
        opened = model.begin(state)
        for step in range(40):
            model.step(torch.tensor([[step % V]]), opened)
    assert 0 < sum(made) <= most


def test_no_memory_and_no_core_is_forgotten() -> None:
    causal = {name for name, contract in CONTRACTS.items() if "/" not in name and contract.model == "language_model"}
    assert causal & {e.name for e in MEMORIES} - {"convolution"} <= OPTIONS.keys()
    cores = {name_of(c).partition(",")[0] for c in CORES}
    for entry in ATTENTIONS:
        if entry.name == "softmax" or entry.name not in CASES or "causal" not in entry.factory.can:
            continue
        in_steps = entry.factory.steps_from is not None
        assert in_steps == (entry.name in cores) != (entry.name in AGAIN), entry.name


@pytest.mark.parametrize("positions", ["rotary", "alibi", "relative", "sinusoidal", "none"])
def test_every_position_scheme(positions: str) -> None:
    compare(build({"name": "compressive", "length": 4, "relative": False, "positions": "age"}, positions=positions))


@pytest.mark.parametrize("options", [{"norm": "post"}, {"bias": False}, {"experts": 2}], ids=str)
def test_every_kind_of_block(options: dict[str, Any]) -> None:
    compare(build({"name": "transformer_xl", "length": 7}, **options))


def test_without_segments_and_in_bfloat16() -> None:
    compare(build(), segment=None, steps=40)
    compare(build({"name": "transformer_xl", "length": 7}).bfloat16(), tolerance=0.1)


@torch.no_grad()
@pytest.mark.parametrize(
    "memory",
    [{"name": "transformer_xl", "length": 64}, pytest.param({"name": "rmt", "length": 3}, marks=pytest.mark.slow)],
    ids=name_of,
)
def test_a_long_text_is_that_of_reading_again(memory: Spec) -> None:
    model, prompt = build(memory).float(), torch.randint(V, (1, 5))
    found = generate(model, prompt, tokens=2000, segment_length=64, temperature=0)
    again = generate(Whole(model), prompt, tokens=2000, segment_length=64, temperature=0)
    assert torch.equal(found.tokens, again.tokens)
    torch.testing.assert_close(found.scores, again.scores, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(found.state, again.state, rtol=0, atol=0)  # written by one pass over the segment


class Whole(torch.nn.Module):
    """A model that offers only its call."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model, self.init_state = model, model.init_state

    def forward(self, tokens: Tensor, state: Any) -> Any:
        return self.model(tokens, state)


@pytest.mark.parametrize("memory", ["transformer_xl", "memformer", "segatron"])
def test_beams_find_the_same_texts(memory: str) -> None:
    model, prompt = build({"name": memory, "length": 5}), torch.randint(V, (2, 4))
    options: dict[str, Any] = {"tokens": 14, "segment_length": SEGMENT, "beams": 4, "eos": 2}
    found, again = (generate(m, prompt, **options) for m in (model, Whole(model)))
    assert torch.equal(found.tokens, again.tokens) and torch.equal(found.lengths, again.lengths)
    torch.testing.assert_close(found.scores, again.scores, rtol=0, atol=1e-10)
    torch.testing.assert_close(found.state, again.state, rtol=0, atol=1e-10)


@pytest.mark.parametrize("memory", ["grc_stream", "infini", "memorizing"])
@torch.no_grad()
def test_an_empty_memory_is_read_by_no_token(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a segment, by the first tokens; when it has been written, by every token, of every row."""
    model = build({"name": memory, **OPTIONS[memory][0]})
    reader = next(b.attention.memory for b in reversed(model.stack.blocks) if b.attention.memory.needs)
    calls: list[int] = []
    read = type(reader).read
    monkeypatch.setattr(
        type(reader), "read", lambda self, *a: (calls.append(1) if self is reader else None, read(self, *a))[1]
    )
    text = GeneratedText(model, torch.zeros(2, 2, dtype=torch.long), model.init_state(2), SEGMENT)
    counts = []
    for _ in range(SEGMENT + 3):
        before = len(calls)
        text.append(text.read().argmax(-1))
        counts.append(len(calls) - before)
    # The first prompt, tokens of an empty memory; the segment as a whole, before the token that opens the next one.
    assert counts == [1, *[0] * (SEGMENT - 3), 1, *[1] * 4]


class Reads(LayerMemory):
    """Looks at the whole segment when it is read, and promises nothing."""

    def read(self, state: Any, query: Query, project_kv: ProjectKV | None) -> Reading:
        return Reading(output_BHNE=query.q_BHNE)

    def combine(self, y_BHNE: Tensor, query: Query, reading: Reading) -> Tensor:
        return y_BHNE + reading.output_BHNE


class Promises(Reads):
    def open(self, state: Any, first_B1P: Tensor | None, project_kv: ProjectKV | None) -> Any:
        return state


class BreaksIt(Promises):
    """A child that reads in its own way is not held to its parent's word."""

    def read(self, state: Any, query: Query, project_kv: ProjectKV | None) -> Reading:
        return super().read(state, query, project_kv)


class Enters(ModelMemory):
    def enter(self, opened: Any, tokens: Tokens) -> Entry:
        return super().enter(opened, tokens)


@pytest.mark.parametrize(
    ("kind", "says"), [(Reads, "memory Reads has no open"), (Promises, None), (BreaksIt, "BreaksIt")]
)
def test_a_memory_that_promises_nothing_is_shown_the_segment_again(kind: Any, says: str | None) -> None:
    model = build()
    model.stack.blocks[1].attention.memory = kind()  # type: ignore[union-attr, assignment]
    why = model.why_in_one_piece()
    assert (why is None) if says is None else (why is not None and says in why)
    if says is not None:
        with pytest.warns(ReadsAgain, match=f"{says}.* each token costs a pass over the partial segment"):
            generate(model, torch.zeros(1, 1, dtype=torch.long), tokens=2)


@pytest.mark.parametrize("name", [name for name in stream_memories() if not name.startswith("outside")])
def test_every_memory_is_opened_by_default(name: str) -> None:
    assert build(name).why_in_one_piece() is None


WHOLE: list[dict[str, Any]] = [
    {"name": "crtn", "segment": SEGMENT, "scope": "token"},
    {"name": "read_twice", "block_length": 2},
    {"name": "segatron", "shift": "official", "allow_leak": True},
    {"name": "titans", "place": "context"},
]


def test_explain_names_the_options_with_which_a_memory_is_not_opened() -> None:
    facts = {name: MEMORIES.entry(name).info.get("reads_again") for name in stream_memories()}
    assert {name for name, fact in facts.items() if fact} == {spec["name"] for spec in WHOLE}
    assert all(any(option in facts[spec["name"]] for option in spec) for spec in WHOLE)


@pytest.mark.parametrize("over", ["infini", "titans", "ttt"])
def test_a_first_segment_is_written_beside_an_empty_memory(over: str) -> None:
    """In a row without a past, the memory is not read; `titans` and `ttt` read their own writes."""
    model = stirred(build({"name": "memory_caching", "over": over}), 0.3).double().eval()
    prompt_BN = torch.tensor([[1, 2]])
    found = generate(model, prompt_BN, tokens=SEGMENT - 3, segment_length=SEGMENT, temperature=0).tokens
    with torch.no_grad():
        scores_BNV = model(torch.cat([prompt_BN, found], 1)[:, :-1]).outputs
    assert torch.equal(scores_BNV[:, 1:].argmax(-1), found)


def test_reasons() -> None:
    model = build()
    model.stack.model_memory = Enters()
    assert "memory Enters has no open" in str(why_in_one_piece(model.stack))
    reasons = ["memory CRTN: scope='token'", "block_length=2", "shift='official'", "place='context'"]
    for spec, reason in zip(WHOLE, reasons, strict=True):
        assert reason in str(build(spec).why_in_one_piece())
    assert "Star" in str(build(None, attention_spec("star")).why_in_one_piece())
    assert "reversible" in str(build(reversible=True).why_in_one_piece())
    for module in (model, model.stack, model.stack.blocks[0], model.stack.blocks[1].attention):  # type: ignore[union-attr]
        watched = build()
        place = dict(model.named_modules(remove_duplicate=False))
        path = next(name for name, m in place.items() if m is module)
        watched.get_submodule(path).register_forward_hook(lambda *_: None)
        assert "has hooks" in str(watched.why_in_one_piece())


class NewContext(LayerMemory):
    """Breaks its word: another context for each token."""

    needs = frozenset({"context"})

    def open(self, state: Any, first_B1P: Tensor | None, project_kv: ProjectKV | None) -> Any:
        return state

    def read(self, opened: Any, query: Query, project_kv: ProjectKV | None) -> Reading:
        assert query.k_BHNE is not None and query.v_BHNE is not None and query.positions_BNP is not None
        rows = len(query.x_BND)
        context = Context(
            *(t.mean(2, keepdim=True) for t in (query.k_BHNE, query.v_BHNE)),
            query.positions_BNP[:, :1],
            torch.ones(rows, 1, dtype=torch.bool),
        )
        return Reading(context)


def test_a_broken_promise_is_an_error_and_a_kept_one_silent() -> None:
    model = build(positions="none")
    model.stack.blocks[0].attention.memory = NewContext()  # type: ignore[union-attr, assignment]
    refuses("NewContext", generate, model, torch.zeros(1, 1, dtype=torch.long), tokens=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(build({"name": "rmt", "length": 3}), torch.zeros(1, 1, dtype=torch.long), tokens=8, segment_length=4)
