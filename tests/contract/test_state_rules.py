"""Rules of state: structure, emptiness, rows, padding, saving, size."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from contract import contract_cases as C
from drills import padding
from torch import Tensor

from cached_transformers import state as states
from cached_transformers.layers.stack import ModelOutput
from cached_transformers.memories.grc.shared_cache import caches, commit_caches
from cached_transformers.models.generation import GeneratedText
from cached_transformers.models.segments import read_segments
from cached_transformers.registry import MEMORIES


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def near(a: states.State, b: states.State) -> None:
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-5)  # sums over tokens may be large


def test_the_table_names_only_what_exists() -> None:
    assert {label.partition("/")[0] for label in C.CONTRACTS} - {"none"} <= set(MEMORIES.names())
    for contract in C.CONTRACTS.values():
        assert {key.partition(":")[0] for key in contract.exempt} <= set(C.RULES)
    assert {case.name for case in C.CASES} == {"none", *MEMORIES.names()}


@C.cases()
@pytest.mark.parametrize("training", [False, True])
def test_structure_of_the_state_never_changes(case: C.Case, training: bool) -> None:
    model = case.build().train(training)
    fresh = model.init_state(C.ROWS)
    for out in C.stream(model, case.segments(6)):
        assert states.signature(out.state) == states.signature(fresh)
        for name, tensor in states.named_tensors(out.state):
            assert tensor.is_contiguous() and tensor.shape[0] == C.ROWS, name


@C.cases(C.STREAMS, rule="remembers")
def test_later_segments_depend_on_earlier_ones(case: C.Case) -> None:
    model = case.build().eval()
    first, second = case.segments(2)
    told = [model(second, model(other, None).state).outputs for other in (first, first.flip(1))]
    assert (told[0] - told[1]).abs().max() > 1e-3


@C.cases([case for case in C.CASES if case.shared])
def test_evaluation_depends_on_what_training_put_into_the_shared_cache(case: C.Case) -> None:
    told = []
    for seed in (1, 2):
        model = case.build()
        model(case.segments(1, seed=seed)[0])
        told.append(model.eval()(case.segments(1)[0]).outputs)
    assert (told[0] - told[1]).abs().max() > 1e-3


@C.cases(C.STREAMS, rule="empty")
def test_an_empty_memory_is_no_memory_whatever_stands_in_its_slots(case: C.Case) -> None:
    model, plain = case.build().eval(), case.build(memory=False).eval()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if k in plain.state_dict()})
    segment = case.segments(1)[0]
    poison = lambda t: t * torch.nan if t.is_floating_point() else t  # noqa: E731
    out = model(segment, states.map_state(poison, model.init_state(C.ROWS)))
    close(out.outputs, plain(segment).outputs)
    later = model(segment, out.state)
    assert later.outputs.isfinite().all(), "poison of an empty slot came out later"
    later.outputs.square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters()), "poison came back"


# A memory's keys are seen by every query. That makes a stream the whole only where the segment's own keys are, too.
SEEING_ALL = ("softmax", "linear", "performer", "rfa")


PROMISED = [c for c in C.STREAMS if c.memory != "none" and "exact_when" in MEMORIES.entry(c.name).info]


@C.cases([case for case in C.STREAMS if case.memory == "none" or (case in PROMISED and case.attention in SEEING_ALL)])
def test_segments_equal_the_whole_where_promised(case: C.Case) -> None:
    exact = {} if case.memory == "none" else case.contract.exact
    assert exact is not None, f"{case.memory} promises exactness: say in CONTRACTS with which options"
    model = case.build(options=exact).eval()
    tokens = torch.cat(case.segments(4), 1)
    pieces = [tokens] if case.memory == "none" else tokens.split(5, 1)  # a short one at the end
    close(torch.cat([out.outputs for out in C.stream(model, list(pieces))], 1), model(tokens).outputs)


@C.cases([case for case in C.STREAMS if case.attention == "softmax"])
def test_no_loop_changes_a_state_that_somebody_holds_and_in_place_it_reads_the_same(case: C.Case) -> None:
    model, inputs = case.build().eval(), case.segments(5)

    def read(tokens_BN: Tensor, state: states.State, reset_B: Tensor | None) -> ModelOutput:
        return model(tokens_BN, state)  # type: ignore[no-any-return]

    with torch.no_grad():
        plain = list(C.stream(model, inputs))
        held = plain[1].state
        before = states.map_state(torch.clone, held)
        outs = read_segments(read, inputs[2:], states.seal(held), in_place=True)
        for out, expected in zip(outs, plain[2:], strict=True):
            same(out, expected)
        text = GeneratedText(model, torch.cat(inputs[2:], 1), held, C.SEGMENT)
        text.read()
        same(text.after(), plain[-1].state)
    same(held, before)


@C.cases(C.TEXT)
def test_a_reset_row_is_a_fresh_row_and_the_others_do_not_notice(case: C.Case) -> None:
    model = case.build().eval()
    *before, after1, after2 = case.segments(5)
    *_, last = C.stream(model, before)
    rows = torch.tensor([False, True, False])
    reset = states.reset(last.state, model.init_state(C.ROWS), rows)
    after = [after1, after2]
    read = (C.stream(model, after, state) for state in (reset, last.state, None))
    for out, kept, fresh in zip(*read, strict=True):
        close(out.outputs[1], fresh.outputs[1], 1e-6)
        assert torch.equal(out.outputs[::2], kept.outputs[::2])
        same(states.map_state(lambda t: t[::2], out.state), states.map_state(lambda t: t[::2], kept.state))
    if case.language:
        by_argument = model(after1, last.state, torch.tensor([False, True, False])).outputs
        assert torch.equal(by_argument, model(after1, reset).outputs)


@C.cases(C.TEXT)
def test_reordered_rows_are_rows_reordered_before(case: C.Case) -> None:
    model = case.build().eval()
    *before, after = case.segments(4)
    order = torch.tensor([2, 0, 0])
    *_, last = C.stream(model, before)
    *_, other = C.stream(model, [segment[order] for segment in before])
    late, early = (model(after[order], s) for s in (states.reorder(last.state, order), other.state))
    close(late.outputs, early.outputs)
    near(late.state, early.state)


@C.cases(C.TEXT)
@pytest.mark.parametrize("training", [False, True])
def test_padding_behind_the_tokens_changes_nothing(case: C.Case, training: bool) -> None:
    # In float32 a processor may round products of another size so that an attention chooses another key.
    trimmed, padded = (case.build().double().train(training) for _ in range(2))
    state, other = trimmed.init_state(C.ROWS), padded.init_state(C.ROWS)
    for index, segment in enumerate(case.segments(3)):
        filler = torch.full((C.ROWS, 3), index)
        padding = torch.zeros(C.ROWS, C.SEGMENT + 3, dtype=torch.bool)
        padding[:, C.SEGMENT :] = True
        out = trimmed(segment, state)
        with_padding = padded(torch.cat([segment, filler], 1), other, padding=padding)
        state, other = out.state, with_padding.state
        close(with_padding.outputs[:, : C.SEGMENT] if case.language else with_padding.outputs, out.outputs)
    near(other, state)
    for a, b in zip(caches(trimmed), caches(padded), strict=True):
        a.commit(), b.commit()
        close(a.cache_MC, b.cache_MC)


PLACES = [
    C.Case(memory, name, "language_model")
    for memory in ("armt", "memory_transformer/control")
    for name in ("axial", "bigbird", "bp_transformer", "etc", "longformer", "reformer", "sparse_transformer", "star")
]
"""Memory tokens beside attentions whose patterns count places."""


@C.cases([*C.STREAMS, *PLACES], rule="padding_in_front")
def test_padding_on_any_side_and_among_tokens_changes_nothing(case: C.Case) -> None:
    for held in ("NaN", "NaN in every layer"):
        padding.compare(padding.Model(case.build(tied=False), case.model, C.VOCABULARY), Random(0), held)


@C.cases()
def test_saved_and_loaded_it_goes_on_bit_by_bit(case: C.Case, tmp_path: Path) -> None:
    model = case.build()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    inputs = case.segments(5)
    state = model.init_state(C.ROWS)
    for segment in inputs[:3]:
        optimizer.zero_grad()
        out = model(segment, state)
        out.outputs.square().mean().backward()
        optimizer.step()
        state = states.detach(out.state)
    states.save(state, tmp_path / "state.safetensors")
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    other = case.build()
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    loaded = states.load(tmp_path / "state.safetensors", other.init_state(C.ROWS))
    same(loaded, state)
    same(list(C.stream(model, inputs[3:], state)), list(C.stream(other, inputs[3:], loaded)))
    commit_caches(model), commit_caches(other)
    same(dict(model.state_dict()), dict(other.state_dict()))


@C.cases()
def test_the_state_is_as_large_as_the_docstring_says(case: C.Case) -> None:
    formula = case.contract.bytes_per_row
    assert formula is not None, f"say in CONTRACTS how large the state of {case.memory} is"
    model = case.build()
    layers = C.DEPTH if case.in_layers else 1
    assert states.nbytes(model.init_state(C.ROWS)) == C.ROWS * (layers * formula(C.WIDTH) + 8)  # the clock
