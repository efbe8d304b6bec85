"""Every memory with every attention: a pair either runs, or is refused when it is built, for a listed reason."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from contract.contract_cases import ATTENTION_ROWS, CONTRACTS, DEPTH, HEADS, MODEL_SIZES, WIDTH, Case
from torch import Tensor, nn

from cached_transformers import create_model
from cached_transformers.interfaces.memory import LayerMemory, Memory
from cached_transformers.layers.stack import ModelOutput
from cached_transformers.memories import create_memory
from cached_transformers.registry import ATTENTIONS

REASONS = {
    "cannot": r"(memory|a layer|a ContextAttention|the position scheme|the window of memory) .*"
    r"needs (bias|bidirectional|causal|context"
    r"|cross|lse|weights) \(.*\), which attention .* does not give",
    "unknown length": r"attention '\w+' needs length, which this model does not know",
    "no place": r"memory \w+ needs (pieces|token_ids|token_map) \(.*\), which this model does not give; take ",
    "no causal memory": r"shows each token the rest of its segment and cannot serve a causal model",
    "unseen": r"place='back' in a causal model puts the memory where no token sees it",
}
"""Why a pair does not exist. What a core lacks is what `cached list attentions` shows."""


@functools.cache
def models_of(label: str) -> tuple[str, ...]:
    """Return the models that fit a memory."""
    if CONTRACTS[label].models is not None:
        return CONTRACTS[label].models or ()
    if label == "none":
        return ("language_model", "sequence_classifier")
    name = label.partition("/")[0]
    options: dict[str, Any] = {k: v for k, v in CONTRACTS[label].options.items() if k == "scope"}
    facts = {"length": 5, "prefix": 0, "depth": DEPTH, "sequence": True, **options}
    memory = LayerMemory() if name == "none" else create_memory(name, WIDTH, HEADS, **facts)
    return ("sequence_classifier",) if "bidirectional" in memory.needs else ("language_model",)


@functools.cache
def needs_of(label: str) -> frozenset[str]:
    """Return the capability words that decide with which attentions a row of the table fits."""
    model = Case(label, "softmax", models_of(label)[0]).build_shallow() if models_of(label) else None
    memories = [m for m in model.modules() if isinstance(m, Memory)] if model is not None else []
    return frozenset().union(*(memory.needs for memory in memories))


def places(attention: str, every: bool) -> Iterator[tuple[str, str]]:
    """Rows of memories and the models in which they are tried with an attention.

    Exact attention is tried with all rows in all models. Others, unless `every`, are tried where the memory belongs
    with one row of each memory and its rows of other needs, and elsewhere with one row of each needs. A row of an
    attention is tried with one row of each memory.
    """
    first = {label.partition("/")[0]: label for label in reversed(CONTRACTS)}.values()
    distinct = {(label.partition("/")[0], needs_of(label)): label for label in reversed(CONTRACTS)}.values()
    at_home = CONTRACTS if every or attention == "softmax" else distinct if attention in ATTENTIONS else first
    for label in at_home:
        yield from ((label, kind) for kind in models_of(label))
    needs = {(needs_of(label), models_of(label)): label for label in reversed(CONTRACTS)}.values()
    for label in CONTRACTS if every or attention == "softmax" else needs:
        yield from ((label, kind) for kind in MODEL_SIZES if kind not in models_of(label))


def answer(model: nn.Module, kind: str, segment: Tensor, state: Any) -> ModelOutput:
    """Outputs of any of the models for a segment."""
    return model(segment, segment, state=state) if kind == "encoder_decoder" else model(segment, state)


def read_on(case: Case, model: nn.Module) -> None:
    """Two segments, the second with the state of the first; where the memory belongs, their gradient too."""
    at_home = case.model in models_of(case.memory)
    with torch.set_grad_enabled(at_home):
        state, total = model.init_state(2), torch.zeros(())  # type: ignore[operator]
        for segment in case.segments(2, rows=2):
            out = answer(model, case.model, segment, state)
            state, total = out.state, total + out.outputs.square().mean() + out.auxiliary_loss
            assert out.outputs.isfinite().all()
    if at_home:
        total.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is None or parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("attention", [*ATTENTIONS.names(), *ATTENTION_ROWS])
def test_a_pair_reads_on_with_its_state_or_is_refused_when_built(attention: str, every: bool) -> None:
    ran = Counter[bool]()
    for label, kind in places(attention, every):
        case = Case(label, attention, kind)
        try:
            model = case.build_shallow()
        except ValueError as error:
            assert any(re.search(reason, str(error)) for reason in REASONS.values()), f"{label}, {kind}: {error}"
            continue
        try:
            read_on(case, model)
        except Exception as error:
            raise AssertionError(f"{label}, {kind}: {type(error).__name__}: {error}") from error
        ran[kind in models_of(label)] += 1
    assert ran[True] > 0
    if attention == "softmax":
        assert ran[True] == sum(len(models_of(label)) for label in CONTRACTS)


@pytest.mark.parametrize(
    ("memory", "kind", "message"),
    [
        ("feedback", "sequence_classifier", "memory Feedback needs pieces .* take language_model or encoder_decoder"),
        ("feedback", "vision_transformer", "memory Feedback needs pieces .* would see only the first piece"),
        ({"name": "read_twice", "block_length": 3}, "sequence_classifier", "memory ReadTwice needs pieces"),
        ({"name": "read_twice", "block_length": 3}, "vision_transformer", "memory ReadTwice needs pieces"),
        ("segatron", "vision_transformer", r"memory Segatron needs token_ids \(the token ids of the segment\)"),
        (
            {"name": "grc", "variant": "released"},
            "sequence_classifier",
            "memory GRC needs token_map .*variant='algorithm1'",
        ),
        ({"name": "grc", "variant": "released"}, "encoder_decoder", "memory GRC needs token_map"),
        ({"name": "convolution", "sequence": False}, "encoder_decoder", "memory ConvolutionControl needs token_map"),
    ],
)
def test_a_memory_without_a_place_is_refused_with_the_way_out(memory: Any, kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_model(kind, memory=memory, **MODEL_SIZES[kind])
