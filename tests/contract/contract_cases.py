"""What the contract tests run over: every registered memory with every attention core that fits, in its natural model.

A memory is tested by being registered. `CONTRACTS` is the one place for what a memory needs said about it: small sizes,
the formula of its state's size, and the rules that it is exempt from, each with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import contract.example_memories  # noqa: F401  (registers the examples)
import pytest
import torch
from attentions.cases import CASES as ATTENTION_CASES
from attentions.cases import Case as AttentionCase
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.attentions import create_attention
from cached_transformers.layers.stack import ModelOutput
from cached_transformers.memories import create_memory
from cached_transformers.registry import ATTENTIONS, MEMORIES, MODELS
from cached_transformers.seam.memory import LayerMemory
from cached_transformers.tasks import create_model
from cached_transformers.training.segments import SegmentLoop

ROWS, SEGMENT, VOCABULARY, WIDTH, HEADS, DEPTH = 3, 6, 11, 16, 2, 2


MODEL_SIZES: dict[str, dict[str, Any]] = {
    "language_model": {"vocabulary": VOCABULARY},
    "sequence_classifier": {"vocabulary": VOCABULARY, "classes": 3, "max_length": 2 * SEGMENT},
    "vision_transformer": {"image_size": 8, "patch_size": 4, "channels": 1, "classes": 3},
    "encoder_decoder": {"vocabulary": VOCABULARY, "max_length": 2 * SEGMENT, "dropout": 0.0},
}
"""What each model needs beside the sizes that all have."""


@dataclass(frozen=True)
class Contract:
    """What has to be said about one memory.

    Attributes:
        options: small sizes; what is not named here keeps its default.
        bytes_per_row: size of the state of one layer (of the model, for a model memory), for float32 and width D.
        exact: options with which a stream cut into segments equals the whole; needed where `exact_when` is registered.
        models: the models that take these options; None for all that suit the memory.
        model: options of the model, with and without the memory, where the model offers them.
        detached: no gradient flows through the state, whatever `bptt` says.
        exempt: name of a rule, or rule:model, -> why it does not apply.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    bytes_per_row: Callable[[int], int] | None = None
    exact: Mapping[str, Any] | None = None
    models: tuple[str, ...] | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    detached: bool = False
    exempt: Mapping[str, str] = field(default_factory=dict)


UNREAD = "only the class token is read, and the last layer's convolution reaches the patches alone"
SHARED = "one cache for all rows: the state of a row is empty, and the cache is a buffer, tested as such"
DROPPED = "what the last layer makes of the memory's tokens is dropped, so its output projection and feed-forward rest"
NOTHING = "nothing crosses from one segment to the next"
LEARNED = "the first segment reads learned vectors, which are part of the definition"
FEEDBACK = {"empty": "a token attends the memory alone, not itself: without a memory there is no attention at all"}


def crtn_bytes(d: int, regions: int, segment: int = 9) -> int:
    """Keys, hidden states of all layers, positions, sizes; and the source of the next query."""
    return regions * (4 * DEPTH * segment * d + 4 * d + 8 * segment + 8) + 4 * segment * d


# "name/label" holds the memory to the contract a second time, with other options.
CONTRACTS: dict[str, Contract] = {
    "none": Contract(bytes_per_row=lambda d: 0, exempt={"remembers": "there is no memory"}),
    "convolution": Contract(
        bytes_per_row=lambda d: 0,
        exempt={
            "remembers": "a control that keeps nothing",
            "empty": "a control: its convolution acts from the first segment on",
            "learns:vision_transformer": UNREAD,
        },
    ),
    "grc": Contract(
        bytes_per_row=lambda d: 0,
        exempt={
            "remembers": SHARED,
            "empty": "a cache of zeros is read and mixed like any other (Algorithm 1 starts so)",
        },
    ),
    "grc/released": Contract(
        options={"variant": "released"},
        models=("vision_transformer",),
        bytes_per_row=lambda d: 0,
        exempt={"remembers": SHARED, "empty": "as grc", "learns": UNREAD},
    ),
    "grc_stream": Contract(options={"length": 4}, bytes_per_row=lambda d: 2 * 4 * (d // 2) * 4 + 8),
    "transformer_xl": Contract(
        options={"length": 8},
        bytes_per_row=lambda d: 8 * (4 * d + 8) + 8,
        exact={"length": 64},
        model={"positions": "relative"},
        detached=True,
    ),
    "transformer_xl/absolute": Contract(
        options={"length": 8, "relative": False},
        bytes_per_row=lambda d: 8 * (4 * d + 8) + 8,
        exact={"length": 64},
        detached=True,
    ),
    "transformer_xl/same_length": Contract(
        options={"length": 8, "same_length": True, "relative": False},
        bytes_per_row=lambda d: 8 * (4 * d + 8) + 8,
        exact={"length": 8},
        detached=True,
    ),
    "segatron": Contract(
        options={"length": 8, "sentence_ends": (1, 4, 6), "paragraph_ends": (2,), "widths": (6, 6, 4)},
        bytes_per_row=lambda d: 16 + DEPTH * (8 * (4 * d + 24) + 8),
        exact={"length": 64},
        detached=True,
        exempt={"empty": "tokens of one segment know their distance in sentences too; tests/memories has the rule"},
    ),
    "segatron/given_positions": Contract(
        options={"length": 8, "sentence_ends": (1,), "same_length": True},
        bytes_per_row=lambda d: 16 + DEPTH * (8 * (4 * d + 24) + 8),
        exact={"length": 8},
        model={"positions": "relative"},
        detached=True,
    ),
    "ernie_doc": Contract(
        options={"length": 4},
        bytes_per_row=lambda d: 4 * (4 * d + 8) + 8,
        model={"positions": "relative"},
        detached=True,
    ),
    "ernie_doc/zeros": Contract(
        options={"length": 4, "start": "zeros", "longest": 10},
        bytes_per_row=lambda d: 4 * (4 * d + 8) + 8,
        detached=True,
        exempt={"empty": "the release's start: rows of zeros that are attended"},
    ),
    "infinity_former": Contract(
        options={"length": 4, "chunk": 2, "basis": 8, "widths": (0.1, 0.2), "kl_weight": 0.0},
        bytes_per_row=lambda d: 5 * (4 * d + 8) + 8 + 4 * 8 * d + 8,
        model={"positions": "relative"},
        detached=True,
    ),
    "infinity_former/uniform": Contract(
        options={
            **{"length": 1, "chunk": 4, "basis": 12, "widths": (0.05, 0.1), "samples": 9, "kl_weight": 0.0},
            **{"sampling": "uniform", "relative": False, "normalise": False},
        },
        bytes_per_row=lambda d: 4 * (4 * d + 8) + 8 + 4 * 12 * d + 8,
        detached=True,
    ),
    "memorizing": Contract(
        options={"length": 8, "k": 4},
        bytes_per_row=lambda d: (8 * 8 * d + 8) // DEPTH,  # one layer of the two has it
        detached=True,
    ),
    "memorizing/joint": Contract(
        options={"length": 16, "k": 16, "joint": True},  # all: half precision puts near neighbours in another order
        bytes_per_row=lambda d: (16 * 8 * d + 8) // DEPTH,
        detached=True,
    ),
    "memorizing/layer": Contract(
        options={"length": 64, "k": 3, "layer": 1},
        bytes_per_row=lambda d: (64 * 8 * d + 8) // DEPTH,
        detached=True,
        exempt={"remembers": "keys have no positions: the first layer's store knows the tokens, not their order"},
    ),
    "memory_transformer": Contract(
        options={"length": 3}, bytes_per_row=lambda d: 0, exempt={"remembers": NOTHING, "empty": LEARNED}
    ),
    "memory_transformer/control": Contract(
        options={"length": 3, "control": True, "mask": "causal"},
        bytes_per_row=lambda d: 0,
        exempt={"remembers": NOTHING, "empty": LEARNED, "learns": DROPPED},
    ),
    "memory_transformer/cache": Contract(
        options={"length": 3, "cache": 4},
        bytes_per_row=lambda d: DEPTH * (4 * (4 * d + 8) + 8),
        model={"positions": "relative"},
        detached=True,
        exempt={"empty": LEARNED},
    ),
    "memory_transformer/encoder": Contract(
        options={"length": 3},
        models=("sequence_classifier", "vision_transformer"),
        bytes_per_row=lambda d: 0,
        exempt={"remembers": NOTHING, "empty": LEARNED},
    ),
    "memory_transformer/back": Contract(
        options={"length": 3, "place": "back", "control": True},
        models=("sequence_classifier", "vision_transformer"),
        bytes_per_row=lambda d: 0,
        exempt={"remembers": NOTHING, "empty": LEARNED, "learns": DROPPED},
    ),
    "rmt": Contract(options={"length": 3}, bytes_per_row=lambda d: 4 * 3 * d + 8, exempt={"empty": LEARNED}),
    "rmt/causal": Contract(
        options={"length": 3, "mask": "causal"},
        bytes_per_row=lambda d: 4 * 3 * d + 8,
        model={"norm": "post", "positions": "relative"},
        exempt={"empty": LEARNED},
    ),
    "rmt/cache": Contract(
        options={"length": 3, "cache": 4},
        bytes_per_row=lambda d: 4 * 3 * d + 8 + DEPTH * (4 * (4 * d + 8) + 8),
        model={"positions": "relative"},
        exempt={"empty": LEARNED},
    ),
    "rmt/read_cache": Contract(
        options={"length": 3, "cache": 4, "read_cache": True, "mask": "causal"},
        bytes_per_row=lambda d: 4 * 3 * d + 8 + DEPTH * (4 * (4 * d + 8) + 8),
        exempt={"empty": LEARNED},
    ),
    "memformer": Contract(options={"length": 3}, bytes_per_row=lambda d: 4 * 3 * d + 8, exempt={"empty": LEARNED}),
    "crtn": Contract(
        options={"segment": 9, "regions": 4, "topk": 2, "rescale": True},
        bytes_per_row=lambda d: crtn_bytes(d, 4),
        model={"positions": "relative"},
    ),
    "crtn/compute_first": Contract(
        options={"segment": 9, "query": "compute_first", "summary": "bilstm", "regions": 3, "placed": "packed"},
        bytes_per_row=lambda d: crtn_bytes(d, 3),
        model={"positions": "relative"},
        exempt={"recomputes": "the last segment's first run serves the next one; no backward asks for it"},
    ),
    "crtn/token": Contract(
        options={"segment": 9, "scope": "token", "summary": "mlp", "regions": 3, "relative": False, "empty": "compete"},
        bytes_per_row=lambda d: crtn_bytes(d, 3),
    ),
    "crtn/draft": Contract(
        options={
            **{"segment": 9, "regions": 3, "query": "compute_first", "scope": "token", "summary": "mean"},
            **{"short_memory": 1, "renormalise": "softmax", "rescale": True, "scale": True},
        },
        bytes_per_row=lambda d: crtn_bytes(d, 4),
        model={"positions": "relative"},
    ),
    "crtn/segment": Contract(
        options={"segment": 15, "scope": "segment"},
        bytes_per_row=lambda d: crtn_bytes(d, 5, 15),
        models=("sequence_classifier",),
        exempt={"learns": "the first sequence of a row has no region to choose among"},
    ),
    "compressive": Contract(
        options={"length": 4, "compressed": 3, "rate": 2},
        bytes_per_row=lambda d: (4 + 1 + 3) * (4 * d + 8) + 16,
        exact={"length": 64},
        model={"positions": "relative"},
        detached=True,
    ),
    "compressive/dilated": Contract(
        options={
            "length": 2,
            "compressed": 3,
            "rate": 3,
            "function": "dilated",
            "loss": "autoencoding",
            "positions": "age",
            "relative": False,
        },
        bytes_per_row=lambda d: (2 + 2 + 3) * (4 * d + 8) + 16,
        exact={"length": 64},
        detached=True,
    ),
    "compressive/most_used": Contract(
        options={"length": 4, "compressed": 3, "rate": 3, "function": "most_used", "relative": False},
        bytes_per_row=lambda d: (4 + 2 + 3) * (4 * d + 8) + 16,
        exact={"length": 64},
        detached=True,
    ),
    "feedback": Contract(
        options={"length": 4}, bytes_per_row=lambda d: 4 * (4 * d + 8) + 8, exact={"length": 4}, exempt=FEEDBACK
    ),
    "feedback/separate": Contract(
        options={"length": 4, "shared_kv": False, "positions": "relative", "start": "zeros"},
        bytes_per_row=lambda d: 4 * (4 * d + 8) + 8,
        exact={"length": 4},
        exempt=FEEDBACK,
    ),
    "feedback/kv": Contract(
        options={"length": 4, "positions": None, "keep": "kv"},
        bytes_per_row=lambda d: 4 * (8 * d + 8) + 8,
        exact={"length": 4},
        exempt=FEEDBACK,
    ),
    "attention_cache": Contract(
        bytes_per_row=lambda d: 0,
        exempt={"remembers": SHARED, "empty": "as grc: a cache of zeros is read and mixed like any other"},
    ),
    "attention_cache/store": Contract(
        options={"update": "store"},
        bytes_per_row=lambda d: 0,
        exempt={"remembers": SHARED, "empty": "as attention_cache"},
    ),
    "read_twice": Contract(options={"slots": 4}, bytes_per_row=lambda d: 4 * (4 * d + 16) + 16),
    "read_twice/joint": Contract(
        options={"slots": 4, "attention": "joint", "summary": "mean", "every": 4, "after": "tanh"},
        bytes_per_row=lambda d: 4 * (4 * d + 16) + 16,
    ),
    "read_twice/side": Contract(
        options={"slots": 4, "summary": "ends", "every": 4, "after": "place", "top_k": 3, "clip": 2, "layer": 1},
        bytes_per_row=lambda d: 4 * (4 * d + 16) + 16,
    ),
    "example_window": Contract(
        options={"length": 8}, bytes_per_row=lambda d: 8 * (4 * d + 8) + 8, exact={"length": 64}
    ),
    "example_tokens": Contract(bytes_per_row=lambda d: 4 * 3 * d + 8),
    "example_slots": Contract(bytes_per_row=lambda d: 4 * 3 * d + 8),
}
RULES = ("remembers", "empty", "learns", "recomputes")


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
        """Whether the model is causal and gives a result per token."""
        return self.model == "language_model"

    def exempt(self, rule: str) -> bool:
        """Whether the rule does not apply, for a reason that the memory's or the attention's table gives."""
        attention = ATTENTION_CASES.get(self.attention, AttentionCase())
        return not {rule, f"{rule}:{self.model}"}.isdisjoint({*self.contract.exempt, *attention.exempt})

    def build(self, *, memory: bool = True, options: Mapping[str, Any] | None = None, **model: Any) -> nn.Module:
        """The model, with the same weights at every call; none keeps an initial value that would hide its effect."""
        spec = None
        if memory and self.memory != "none":
            spec = {"name": self.name, **self.contract.options, **(options or {})}
        torch.manual_seed(1)
        own = {"width": WIDTH, "depth": DEPTH, "heads": HEADS, "feed_forward": 2 * WIDTH, **MODEL_SIZES[self.model]}
        offered = MODELS.entry(self.model).options
        built = create_model(
            self.model,
            attention=attention_spec(self.attention),
            memory=spec,
            **{**own, **{name: value for name, value in self.contract.model.items() if name in offered}, **model},
        )
        with torch.no_grad():
            for parameter in built.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        return built

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
        out = model(self.segments(1, rows=rows, seed=step)[0])
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
            memory = LayerMemory() if name == "none" else create_memory(name, WIDTH, HEADS, **facts)
            if "context" in memory.needs and "context" not in core.can:
                continue
            if CONTRACTS.get(label, Contract()).options.get("joint") and "lse" not in core.can:
                continue
            if getattr(memory, "masks", False) and "bias" not in core.can:
                continue
            kind = {"shared": getattr(memory, "shared", False), "in_layers": isinstance(memory, LayerMemory)}
            suited = ["language_model"] if "causal" in core.can else []
            if not getattr(memory, "causal", True):
                suited = [] if "bidirectional" not in core.can else ["sequence_classifier", "vision_transformer"]
            if attention.name != "softmax":
                suited = [model for model in suited if model == WITH_ALL[label]]
            for model in CONTRACTS.get(label, Contract()).models or suited:
                yield Case(label, attention.name, model, **kind)


CASES = list(_cases())
STREAMS = [case for case in CASES if case.language]
COMPILED = [case for case in CASES if case.attention in ("softmax", "bigbird", "reformer")]
"""Compilation takes many seconds a case, and every core is compiled by itself in tests/attentions: here those of the
paper's Table 6."""
TEXT = [case for case in CASES if case.model != "vision_transformer"]


def cases(
    among: list[Case] = CASES, *, rule: str | None = None, slow: Callable[[Case], bool] = lambda case: False
) -> pytest.MarkDecorator:
    """Parametrise a test over cases, without those exempt from `rule`; those that are `slow` get its marker."""
    held = [c for c in among if rule is None or not c.exempt(rule)]
    marks = {True: [pytest.mark.slow], False: []}
    named = [pytest.param(c, id=f"{c.memory}-{c.attention}-{c.model}", marks=marks[slow(c)]) for c in held]
    return pytest.mark.parametrize("case", named)
