"""Table 5: language models with different memories, at equal size, on the same tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cached_lab.experiments.probes.settings import stream_memories
from cached_lab.training.config import RunConfig
from cached_transformers.registry import MEMORIES

from .base import Reproduction, TableRow

PAPER = ("transformer_xl", "memory_transformer", "rmt", "grc_stream")


class MemorySetup(NamedTuple):
    """Sizes that the options of a row depend on: tokens of a segment, slots in each layer, channels of a head."""

    segment: int
    length: int
    head_width: int


def model_of(recipe: RunConfig, name: str) -> dict[str, Any]:
    """Return the recipe's model with the memory of one row (ValueError if the recipe's memory has no length)."""
    memory = recipe.model.get("memory")
    if not isinstance(memory, Mapping) or not isinstance(memory.get("length"), int):
        raise ValueError(
            f"model.memory={memory!r} must have a length for all memories; each row sets its own memory, so change "
            "model.memory.length only"
        )
    head_width = max(1, recipe.model["width"] // max(1, recipe.model["heads"]))  # the model refuses others
    setup = MemorySetup(recipe.training.segment_length, memory["length"], head_width)
    options = {"length": setup.length} if "length" in MEMORIES.entry(name).options else {}
    if name in OPTIONS:
        options = OPTIONS[name](setup)
    positions = {} if name in OWN_POSITIONS else {"positions": "relative"}
    return {**recipe.model, **positions, **MODEL.get(name, {}), "memory": {"name": name, **options}}


def protocol(config: RunConfig) -> str:
    """Describe the scoring of a row in a line: segment, treatment of the state, and the memory's options but lists."""
    memory = config.model["memory"]
    options = [f"{k}={v}" for k, v in memory.items() if k != "name" and not isinstance(v, (list, tuple))]
    segment = config.evaluation.segment_length or config.training.segment_length
    kept = {"carry": "state carried", "reset": "state reset", "shuffle": "state of another row"}
    return f"segment {segment}, {kept[config.evaluation.memory]}, {' '.join(options) or 'default options'}"


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


def _tokens(setup: MemorySetup) -> dict[str, Any]:
    return {"length": 10, "cache": setup.length}


OPTIONS: Mapping[str, Callable[[MemorySetup], dict[str, Any]]] = {
    "armt": lambda setup: {"length": 10},
    "compressive": lambda setup: {"length": (setup.length + 1) // 2, "compressed": max(1, setup.length // 2)},
    "crtn": _crtn,
    "grc_stream": _grc,
    "h2o": lambda setup: {"length": setup.length // 2, "heavy": setup.length - setup.length // 2},
    "infinity_former": _signal,
    "memformer": lambda setup: {"length": 32},
    "memorizing": lambda setup: {"length": 8 * setup.length, "k": min(32, 8 * setup.length)},
    "memory_transformer": _tokens,
    "read_twice": lambda setup: {"slots": setup.length, "first_read": "running", "scope": "earlier"},
    "rmt": _tokens,
    "streaming_llm": lambda setup: {"length": setup.length - 4},
    # Rotary positions need heads of an even width, and those of XL-base have 41 channels.
    "ttt": lambda setup: {"rotary": setup.head_width % 2 == 0},
}
"""Options by memory, else the recipe's length: as many slots as the recipe's memory if a slot is a token. There are 10
memory tokens beside a Transformer-XL cache of the recipe's length, as in the comparison of arXiv:2207.06881."""
OWN_POSITIONS = frozenset(
    {"compressive", "crtn", "ernie_doc", "expire_span", "feedback", "h2o", "infinity_former"}
    | {"keydiff", "knorm", "lagkv", "segatron", "snapkv", "streaming_llm", "tova", "transformer_xl"}
)
"""Memories whose models have their own positions; other models get relative ones."""
# The positions of Feedback have no biases. No token attends to itself, so without the scale small embeddings vanish
# beside the attended states, and perplexity stays that of the unigram model.
# Expected Attention turns keys, which relative positions do not, and heads of 41 channels have no rotary ones.
MODEL: dict[str, dict[str, Any]] = {
    "expected_attention": {"positions": "sinusoidal"},
    "attention_matching": {"positions": "sinusoidal"},
    "feedback": {"shared_biases": False, "scale_embedding": True},
}


def _row(name: str) -> TableRow:
    return TableRow(name, functools.partial(model_of, name=name), against=() if name == PAPER[0] else (PAPER[0],))


TABLE5 = Reproduction(
    summary="language modelling: Transformer-XL, Memory Transformer, RMT and GRC at equal size",
    recipes={"small": "table5_small", "paper": "table5_paper"},
    files={"small": "WikiText-2", "paper": "WikiText-103"},
    paper=lambda scale: [_row(name) for name in PAPER],
    others=lambda scale: [_row(name) for name in stream_memories() if name not in PAPER],
    equal="parameters",
    protocol=protocol,
)
