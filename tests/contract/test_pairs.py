"""Every memory with every attention: a pair either runs, or is refused when it is built, for a listed reason."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
from contract.contract_cases import CONTRACTS, DEPTH, HEADS, WIDTH, Case, stream

from cached_transformers.memories import create_memory
from cached_transformers.registry import ATTENTIONS
from cached_transformers.seam.memory import LayerMemory

REASONS = {
    "no context": r"offers keys and values, which attention \w+ cannot take \(it lacks context\)",
    "no bias for positions": r"act on the logits, which attention \w+ does not let them",
    "no bias for a window": r"limits how far tokens see, by a mask that attention \w+ cannot take",
    "no bias for a mask": r"chooses which tokens see each other, which attention \w+ cannot take",
    "no log-sum-exp": r"shares one softmax with the layer, .* \(it lacks lse\)",
    "unknown length": r"attention '\w+' needs length, which this model does not know",
    "no causal form": r"attention \w+ has no causal form",
    "causal only": r"attention \w+ has no other than a causal form",
    "no cross-attention": r"own_keys=False needs an attention of context alone",
    "weighs": r"weighs keys by exact attention, which \w+ is not",
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
    return ("language_model",) if memory.causal else ("sequence_classifier",)


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
