"""Every memory with every attention: a pair either runs, or is refused when it is built, for a listed reason."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import pytest
import torch
from contract.contract_cases import ATTENTION_ROWS, CONTRACTS, DEPTH, HEADS, MODEL_SIZES, WIDTH, Case, stream
from torch import Tensor, nn

from cached_transformers.layers.stack import ModelOutput
from cached_transformers.memories import create_memory
from cached_transformers.registry import ATTENTIONS
from cached_transformers.seam.memory import LayerMemory
from cached_transformers.tasks import create_model

REASONS = {
    "cannot": r"(memory|a layer|the position scheme|the window of memory) .*needs (bias|bidirectional|causal|context"
    r"|cross|lse|weights) \(.*\), which attention .* does not give",
    "unknown length": r"attention '\w+' needs length, which this model does not know",
    "no place": r"memory \w+ needs (pieces|token_ids|token_map) \(.*\), which this model does not give; take ",
    "no causal memory": r"shows each token the rest of its segment and cannot serve a causal model",
    "unseen": r"place='back' in a causal model puts the memory where no token sees it",
}
"""Why a pair does not exist. What a core lacks is what `cached list attentions` shows."""


@functools.cache
def models_of(label: str) -> tuple[str, ...]:
    """Where a memory belongs."""
    if CONTRACTS[label].models is not None:
        return CONTRACTS[label].models or ()
    if label == "none":
        return ("language_model", "sequence_classifier")
    name = label.partition("/")[0]
    options: dict[str, Any] = {k: v for k, v in CONTRACTS[label].options.items() if k == "scope"}
    facts = {"length": 5, "prefix": 0, "depth": DEPTH, "sequence": True, **options}
    memory = LayerMemory() if name == "none" else create_memory(name, WIDTH, HEADS, **facts)
    return ("sequence_classifier",) if "whole_segment" in memory.needs else ("language_model",)


@pytest.mark.parametrize("attention", ATTENTIONS.names())
def test_each_pair_runs_or_is_refused_for_a_listed_reason(attention: str) -> None:
    ran = 0
    for label in CONTRACTS:
        for kind in models_of(label):
            case = Case(label, attention, kind)
            try:
                model = case.build_shallow()
            except ValueError as error:
                assert any(re.search(reason, str(error)) for reason in REASONS.values()), f"{label}: {error}"
                continue
            segments = case.segments(2) if kind == "language_model" else case.segments(1, rows=3) * 2
            outs = list(stream(model, segments))
            total = sum(out.outputs.square().mean() + out.auxiliary_loss for out in outs)
            total.backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is None or parameter.grad.isfinite().all(), f"{label}: {name}"
            assert all(out.outputs.isfinite().all() for out in outs), label
            ran += 1
    assert ran > 0
    if attention == "softmax":
        assert ran == sum(len(models_of(label)) for label in CONTRACTS)


def rows_with(attention: str, every: bool) -> list[str]:
    """Rows of memories that are tried: all with exact attention, and with others one of each memory unless `every`."""
    first = {label.partition("/")[0]: label for label in reversed(CONTRACTS)}
    return list(CONTRACTS) if every or attention == "softmax" else list(first.values())


def answer(model: nn.Module, kind: str, segment: Tensor, state: Any) -> ModelOutput:
    """What any of the models makes of a segment."""
    return model(segment, segment, state=state) if kind == "encoder_decoder" else model(segment, state)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("attention", [*ATTENTIONS.names(), *ATTENTION_ROWS])
@torch.no_grad()
def test_in_every_model_a_pair_reads_on_with_its_state_or_is_refused_when_built(attention: str, every: bool) -> None:
    """Where the memory does not belong, too: what a user asks for either works or is refused at once."""
    ran = 0
    for label, kind in itertools.product(rows_with(attention, every), MODEL_SIZES):
        case = Case(label, attention, kind)
        try:
            model = case.build_shallow()
        except ValueError as error:
            assert any(re.search(reason, str(error)) for reason in REASONS.values()), f"{label}, {kind}: {error}"
            continue
        state = model.init_state(2)  # type: ignore[operator]
        try:
            for segment in case.segments(2, rows=2):
                out = answer(model, kind, segment, state)
                state = out.state
                assert out.outputs.isfinite().all(), f"{label}, {kind}"
        except Exception as error:
            raise AssertionError(f"{label}, {kind}: {type(error).__name__}: {error}") from error
        ran += 1
    assert ran > 0


@pytest.mark.parametrize(
    ("memory", "kind", "message"),
    [
        ("feedback", "sequence_classifier", "memory Feedback needs pieces .* take language_model or encoder_decoder"),
        ("feedback", "vision_transformer", "memory Feedback needs pieces .* would have seen the first piece alone"),
        ({"name": "read_twice", "block_length": 3}, "sequence_classifier", "memory ReadTwice needs pieces"),
        ({"name": "read_twice", "block_length": 3}, "vision_transformer", "memory ReadTwice needs pieces"),
        ("segatron", "vision_transformer", r"memory Segatron needs token_ids \(the token ids of the segment\)"),
        ({"name": "grc", "variant": "released"}, "sequence_classifier", "memory GRC needs token_map .*variant='paper'"),
        ({"name": "grc", "variant": "released"}, "encoder_decoder", "memory GRC needs token_map"),
        ({"name": "convolution", "sequence": False}, "encoder_decoder", "memory ConvolutionControl needs token_map"),
    ],
)
def test_a_memory_without_a_place_is_refused_with_the_way_out(memory: Any, kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_model(kind, memory=memory, **MODEL_SIZES[kind])
