"""Cases of the contract tests: every registered memory with every attention core that fits, in its natural model.

A memory is tested by being registered. `CONTRACTS` (contracts.py) says what a memory needs said about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import contract.outside_memory  # noqa: F401  (registers a user's memory)
import pytest
import torch
from attentions.cases import CASES as ATTENTION_CASES
from attentions.cases import Case as AttentionCase
from common import stirred
from contract.contract_row import Contract
from contract.contracts import CONTRACTS
from contract.costs import DEPTH
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers import create_model
from cached_transformers.attentions import create_attention
from cached_transformers.interfaces.memory import LayerMemory
from cached_transformers.layers.stack import ModelOutput
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.memories import create_memory
from cached_transformers.registry import ATTENTIONS, MEMORIES, MODELS

ROWS, SEGMENT, VOCABULARY, WIDTH, HEADS = 3, 6, 11, 16, 2

MODEL_SIZES: dict[str, dict[str, Any]] = {
    "language_model": {"vocabulary": VOCABULARY},
    "sequence_classifier": {"vocabulary": VOCABULARY, "classes": 3, "max_length": 2 * SEGMENT},
    "vision_transformer": {"image_size": 8, "patch_size": 4, "channels": 1, "classes": 3},
    "encoder_decoder": {"vocabulary": VOCABULARY, "max_length": 2 * SEGMENT, "dropout": 0.0},
}
"""Options of each model beside the common sizes."""
RULES = ("remembers", "empty", "learns", "recomputes", "packed")
WITH_ALL = {"grc": "sequence_classifier", "grc_stream": "language_model"}
"""Memories that are held to the contract with every attention, and in which model. The others are with softmax alone;
`test_pairs` sees to it that they run with all that they can be paired with."""


ATTENTION_ROWS: dict[str, dict[str, Any]] = {
    "rfa/gate": {"gate": True},
    "routing/mean": {"combine": "mean"},
    "sinkhorn/outputs": {"combine": "outputs"},
}
"""Options with which an attention can do less than without them, as "name/label"."""


def attention_spec(row: str) -> dict[str, Any]:
    """An attention, or a row of it, with its sizes for short segments."""
    name = row.partition("/")[0]
    options = ATTENTION_CASES[name].options if name in ATTENTION_CASES else {}
    return {"name": name, **options, **ATTENTION_ROWS.get(row, {})}


@dataclass(frozen=True)
class Case:
    """One memory with one attention core in one model."""

    memory: str
    attention: str
    model: str
    shared: bool = False
    in_layers: bool = True

    @property
    def name(self) -> str:
        """The memory's name in the registry."""
        return self.memory.partition("/")[0]

    @property
    def contract(self) -> Contract:
        """The row of the table; a memory without one is held to everything."""
        return CONTRACTS.get(self.memory, Contract())

    @property
    def language(self) -> bool:
        """True if the model is causal and gives a result per token."""
        return self.model == "language_model"

    def exempt(self, rule: str) -> bool:
        """True if the table of the memory or the attention gives a reason to skip the rule."""
        attention = ATTENTION_CASES.get(self.attention, AttentionCase())
        return not {rule, f"{rule}:{self.model}"}.isdisjoint({*self.contract.exempt, *attention.exempt})

    def build(self, *, memory: bool = True, options: Mapping[str, Any] | None = None, **model: Any) -> nn.Module:
        """The model, with the same weights at every call; none keeps an initial value that would hide its effect."""
        spec = self.contract.spec(self.name, options) if memory and self.memory != "none" else None
        torch.manual_seed(1)
        own = {"width": WIDTH, "depth": DEPTH, "heads": HEADS, "feed_forward": 2 * WIDTH, **MODEL_SIZES[self.model]}
        offered = MODELS.entry(self.model).options
        built = create_model(
            self.model,
            attention=attention_spec(self.attention),
            memory=spec,
            **{**own, **{name: value for name, value in self.contract.model.items() if name in offered}, **model},
        )
        return stirred(built, 0.2)

    def build_shallow(self) -> nn.Module:
        """The model with one layer where its layers are alike; two for the plain model and the two forms of GRC.

        For what is done to one layer after the other, as compilers do, in as much more time.
        """
        whole = self.attention == "softmax" and self.name in ("none", "grc", "grc_stream")
        differ = self.name == "memorizing" or "layer" in self.contract.options
        return self.build(depth=DEPTH if whole or differ else 1)

    def segments(self, count: int, *, rows: int = ROWS, seed: int = 0) -> list[Tensor]:
        """Inputs of `count` segments (of a stream), or batches (of images)."""
        generator = torch.Generator().manual_seed(seed)
        if self.model == "vision_transformer":
            return list(torch.randn(count, rows, 1, 8, 8, generator=generator))
        tokens = torch.randint(0, VOCABULARY, (rows, count * SEGMENT), generator=generator)
        return list(tokens.split(SEGMENT, 1))

    def loss(self, model: nn.Module, step: int, *, rows: int = ROWS, segments: int = 2) -> Tensor:
        """A training loss that depends on everything the model computes; new data at each `step`."""
        if self.language:
            tokens = torch.cat(self.segments(segments + 1, rows=rows, seed=step), 1)
            n = segments * SEGMENT
            return SegmentLoop(model, SEGMENT, bptt=segments)(tokens[:, :n], tokens[:, 1 : n + 1])[0]
        inputs = self.segments(1, rows=rows, seed=step)[0]
        out = model(inputs.to(next(model.parameters()).dtype) if inputs.is_floating_point() else inputs)
        return F.cross_entropy(out.outputs, torch.arange(rows) % 3) + out.auxiliary_loss


def stream(model: nn.Module, inputs: list[Tensor], state: Any = None) -> Iterator[ModelOutput]:
    """The model's answer to each segment, the state carried from one to the next."""
    state = model.init_state(inputs[0].shape[0]) if state is None else state  # type: ignore[operator]
    for segment in inputs:
        out = model(segment, state)
        state = out.state
        yield out


def _cases() -> Iterator[Case]:
    facts = {"length": 5, "prefix": 0, "depth": DEPTH, "sequence": True}
    every = [*CONTRACTS, *(name for name in MEMORIES.names() if name not in CONTRACTS)]
    for attention in ATTENTIONS:
        core = create_attention(attention_spec(attention.name), width=WIDTH, heads=HEADS, **facts)
        for label in every if attention.name == "softmax" else WITH_ALL:
            name = label.partition("/")[0]
            beside = CONTRACTS.get(label, Contract()).beside
            memory = LayerMemory() if name == "none" else create_memory([name, *beside], WIDTH, HEADS, **facts)
            if "context" in memory.needs and "context" not in core.can:
                continue
            if CONTRACTS.get(label, Contract()).options.get("joint") and "lse" not in core.can:
                continue
            if "bias" in memory.needs and "bias" not in core.can:
                continue
            kind = {"shared": getattr(memory, "shared", False), "in_layers": isinstance(memory, LayerMemory)}
            suited = ["language_model"] if "causal" in core.can else []
            if "bidirectional" in memory.needs:
                suited = [] if "bidirectional" not in core.can else ["sequence_classifier", "vision_transformer"]
            if attention.name != "softmax":
                suited = [model for model in suited if model == WITH_ALL[label]]
            for model in CONTRACTS.get(label, Contract()).models or suited:
                yield Case(label, attention.name, model, **kind)


TABLE_6 = {("grc", "reformer"), ("grc_stream", "bigbird")}
"""Cores of the paper's Table 6 with either form of GRC."""
CASES = list(_cases())
STREAMS = [case for case in CASES if case.language]
COMPILED = [c for c in CASES if (c.memory, c.attention) in {(c.memory, "softmax"), *TABLE_6}]
"""Compilation takes many seconds a case, and every core is compiled by itself in tests/attentions."""
TEXT = [case for case in CASES if case.model != "vision_transformer"]
FIRST = {label.partition("/")[0]: label for label in reversed(CONTRACTS)}
"""Main row of each memory."""
BOTH_WAYS = {case.attention for case in CASES if case.name == "grc"}
MAIN = [
    case
    for case in CASES
    if case.memory == FIRST.get(case.name, case.name)
    and (case.attention == "softmax" or case.name == "grc" or case.attention not in BOTH_WAYS)
]
"""The main row of each memory and each attention once: for properties that no option can change."""
MAIN_STREAMS = [case for case in STREAMS if case in MAIN]


def cases(
    among: list[Case] = CASES, *, rule: str | None = None, slow: Callable[[Case], bool] = lambda case: False
) -> pytest.MarkDecorator:
    """Parametrise a test over cases, without those exempt from `rule`; those that are `slow` get its marker."""
    held = [c for c in among if rule is None or not c.exempt(rule)]
    marks = {True: [pytest.mark.slow], False: []}
    named = [pytest.param(c, id=f"{c.memory}-{c.attention}-{c.model}", marks=marks[slow(c)]) for c in held]
    return pytest.mark.parametrize("case", named)
