"""Table 5: language models with different memories, at equal size, on the same tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cached_lab.experiments.probes.settings import stream_memories
from cached_lab.training.config import RunConfig
from cached_transformers.registry import MEMORIES

from .base import Reproduction, TableRow

PAPER = ("transformer_xl", "memory_transformer", "rmt", "grc_stream")


@dataclass(frozen=True)
class MemorySetup:
    """Sizes that the options of a row depend on.

    Attributes:
        segment: tokens of a segment.
        length: slots of the recipe's memory, in each layer.
        head_width: channels of a head.
    """

    segment: int
    length: int
    head_width: int


@dataclass(frozen=True)
class MemorySetting:
    """Options of a memory and its model.

    Attributes:
        options: of the memory; None for the recipe's length if it has that option.
        positions: position scheme of the model; None for the memory's own.
        model: other model options that the memory needs.
    """

    options: Callable[[MemorySetup], dict[str, Any]] | None = None
    positions: str | None = None
    model: Mapping[str, Any] = field(default_factory=dict)


def model_of(recipe: RunConfig, name: str) -> dict[str, Any]:
    """Return the recipe's model with the memory of one row (ValueError if the recipe's memory has no length)."""
    memory = recipe.model.get("memory")
    if not isinstance(memory, Mapping) or not isinstance(memory.get("length"), int):
        raise ValueError(
            f"model.memory={memory!r} must have a length for all memories; each row sets its own memory, so change "
            "model.memory.length only"
        )
    head_width = recipe.model["width"] // recipe.model["heads"]
    setup = MemorySetup(recipe.training.segment_length, memory["length"], head_width)
    setting = SETTINGS.get(name, MemorySetting(positions="relative"))
    options = {"length": setup.length} if "length" in MEMORIES.entry(name).options else {}
    if setting.options is not None:
        options = setting.options(setup)
    positions = {} if setting.positions is None else {"positions": setting.positions}
    return {**recipe.model, **positions, **setting.model, "memory": {"name": name, **options}}


def protocol(config: RunConfig) -> str:
    """Describe the scoring of a row in a line: segment, treatment of the state, and the memory's options but lists."""
    memory = config.model["memory"]
    options = [f"{k}={v}" for k, v in memory.items() if k != "name" and not isinstance(v, (list, tuple))]
    segment = config.evaluation.segment_length or config.training.segment_length
    kept = {"carry": "state carried", "reset": "state reset", "shuffle": "state of another row"}
    return f"segment {segment}, {kept[config.evaluation.memory]}, {' '.join(options) or 'default options'}"


def _compressive(setup: MemorySetup) -> dict[str, Any]:
    newest = (setup.length + 1) // 2
    return {"length": newest, "compressed": max(1, setup.length - newest)}


def _crtn(setup: MemorySetup) -> dict[str, Any]:
    recalled = max(1, setup.length // setup.segment)
    # A linear summary would be larger than the rest of the model.
    regions = {"segment": setup.segment, "regions": 4 * recalled, "topk": recalled}
    return {**regions, "rescale": True, "summary": "mean"}


def _grc(setup: MemorySetup) -> dict[str, Any]:
    # Half of the channels as in the paper, rounded to whole channels per head: 20 of 41.
    return {"length": setup.length, "ratio": max(1, setup.head_width // 2) / setup.head_width}


def _signal(setup: MemorySetup) -> dict[str, Any]:
    half = (setup.length + 1) // 2
    return {"length": half, "chunk": setup.segment, "basis": half + half % 2}


def _store(setup: MemorySetup) -> dict[str, Any]:
    return {"length": 8 * setup.length, "k": min(32, 8 * setup.length)}


def _tokens(setup: MemorySetup) -> dict[str, Any]:
    return {"length": 10, "cache": setup.length}


SETTINGS = {
    "armt": MemorySetting(lambda setup: {"length": 10}, "relative"),
    "block_recurrent": MemorySetting(lambda setup: {"length": setup.length}, "relative"),
    "compressive": MemorySetting(_compressive),
    "crtn": MemorySetting(_crtn),
    "ernie_doc": MemorySetting(),
    "expire_span": MemorySetting(),
    # Its positions have no biases. No token attends to itself, so without the scale small embeddings vanish beside the
    # attended states, and perplexity stays that of the unigram model.
    "feedback": MemorySetting(model={"shared_biases": False, "scale_embedding": True}),
    "grc_stream": MemorySetting(_grc, "relative"),
    "h2o": MemorySetting(lambda setup: {"length": setup.length // 2, "heavy": setup.length - setup.length // 2}),
    "infinity_former": MemorySetting(_signal),
    "memformer": MemorySetting(lambda setup: {"length": 32}, "relative"),
    "memorizing": MemorySetting(_store, "relative"),
    "memory_transformer": MemorySetting(_tokens, "relative"),
    "read_twice": MemorySetting(
        lambda setup: {"slots": setup.length, "first_read": "running", "scope": "earlier"}, positions="relative"
    ),
    "rmt": MemorySetting(_tokens, "relative"),
    "segatron": MemorySetting(),
    "streaming_llm": MemorySetting(lambda setup: {"length": setup.length - 4}),
    "tova": MemorySetting(),
    "transformer_xl": MemorySetting(),
    # Rotary positions need heads of an even width, and those of XL-base have 41 channels.
    "ttt": MemorySetting(lambda setup: {"rotary": setup.head_width % 2 == 0}, "relative"),
}
"""Settings by memory: as many slots as the recipe's memory if a slot is a token, relative positions for memories
without their own. There are 10 memory tokens beside a Transformer-XL cache of the recipe's length, as in the
comparison of arXiv:2207.06881. The default is `MemorySetting(positions="relative")`."""


def _row(name: str) -> TableRow:
    return TableRow(name, functools.partial(model_of, name=name), against=() if name == PAPER[0] else (PAPER[0],))


def _others(scale: str) -> Sequence[TableRow]:
    return [_row(name) for name in stream_memories() if name not in PAPER]


TABLE5 = Reproduction(
    summary="language modelling: Transformer-XL, Memory Transformer, RMT and GRC at equal size",
    recipes={"small": "table5_small", "paper": "table5_paper"},
    files={"small": "WikiText-2", "paper": "WikiText-103"},
    paper=lambda scale: [_row(name) for name in PAPER],
    others=_others,
    equal="parameters",
    protocol=protocol,
)
