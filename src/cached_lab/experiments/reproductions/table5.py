"""Table 5: language models with a memory each, at equal size, on the same tokens.

Rows are memories with the options that make them comparable.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cached_lab.experiments.probes.settings import stream_memories
from cached_lab.training.config import RunConfig
from cached_transformers.registry import MEMORIES

from .base import Reproduction, Row

PAPER = ("transformer_xl", "memory_transformer", "rmt", "grc_stream")


@dataclass(frozen=True)
class Setup:
    """What the options of a row may depend on.

    Attributes:
        segment: tokens of a segment.
        length: slots of the recipe's memory, in each layer.
        head_width: channels of a head.
    """

    segment: int
    length: int
    head_width: int


@dataclass(frozen=True)
class Setting:
    """How a memory is set.

    Attributes:
        options: of the memory; None gives it the recipe's length if it has that option.
        positions: position scheme of the model; None takes the memory's own.
        model: other options of the model that the memory cannot do without.
    """

    options: Callable[[Setup], dict[str, Any]] | None = None
    positions: str | None = None
    model: Mapping[str, Any] = field(default_factory=dict)


def model_of(recipe: RunConfig, name: str) -> dict[str, Any]:
    """The recipe's model with the memory of one row.

    Raises:
        ValueError: the recipe's memory has no length.
    """
    memory = recipe.model.get("memory")
    if not isinstance(memory, Mapping) or not isinstance(memory.get("length"), int):
        raise ValueError(
            f"model.memory={memory!r} must say how long memories are; each row puts its own in, so change "
            "model.memory.length only"
        )
    head_width = recipe.model["width"] // recipe.model["heads"]
    setup = Setup(recipe.training.segment_length, memory["length"], head_width)
    setting = SETTINGS.get(name, Setting(positions="relative"))
    if setting.options is not None:
        options = setting.options(setup)
    else:
        options = {"length": setup.length} if "length" in MEMORIES.entry(name).options else {}
    positions = {} if setting.positions is None else {"positions": setting.positions}
    return {**recipe.model, **positions, **setting.model, "memory": {"name": name, **options}}


def protocol(config: RunConfig) -> str:
    """How a row is scored, in a line: segment, what rows keep of their memory, and the memory's options.

    Lists among the options (token ids of sentence ends) are left out.
    """
    memory = config.model["memory"]
    options = [f"{k}={v}" for k, v in memory.items() if k != "name" and not isinstance(v, (list, tuple))]
    segment = config.evaluation.segment_length or config.training.segment_length
    kept = {"carry": "state carried", "reset": "state reset", "shuffle": "state of another row"}
    return f"segment {segment}, {kept[config.evaluation.memory]}, {' '.join(options) or 'default options'}"


def _compressive(setup: Setup) -> dict[str, Any]:
    newest = (setup.length + 1) // 2
    return {"length": newest, "compressed": max(1, setup.length - newest)}


def _crtn(setup: Setup) -> dict[str, Any]:
    recalled = max(1, setup.length // setup.segment)
    # A linear summary would be larger than the rest of the model.
    regions = {"segment": setup.segment, "regions": 4 * recalled, "topk": recalled}
    return {**regions, "rescale": True, "summary": "mean"}


def _grc(setup: Setup) -> dict[str, Any]:
    # Half of the channels as in the paper, or as near to it as whole channels of each head come: 20 of 41.
    return {"length": setup.length, "ratio": max(1, setup.head_width // 2) / setup.head_width}


def _signal(setup: Setup) -> dict[str, Any]:
    half = (setup.length + 1) // 2
    return {"length": half, "chunk": setup.segment, "basis": half + half % 2}


def _store(setup: Setup) -> dict[str, Any]:
    return {"length": 8 * setup.length, "k": min(32, 8 * setup.length)}


def _tokens(setup: Setup) -> dict[str, Any]:
    return {"length": 10, "cache": setup.length}


SETTINGS = {
    "armt": Setting(lambda setup: {"length": 10}, "relative"),
    "block_recurrent": Setting(lambda setup: {"length": setup.length}, "relative"),
    "compressive": Setting(_compressive),
    "crtn": Setting(_crtn),
    "ernie_doc": Setting(),
    "expire_span": Setting(),
    # Its positions have no biases; and since no token attends itself, one whose embedding is small drowns in what it
    # attends: without the scale perplexity stays that of the unigram model.
    "feedback": Setting(model={"shared_biases": False, "scale_embedding": True}),
    "grc_stream": Setting(_grc, "relative"),
    "h2o": Setting(lambda setup: {"length": setup.length // 2, "heavy": setup.length - setup.length // 2}),
    "infinity_former": Setting(_signal),
    "memformer": Setting(lambda setup: {"length": 32}, "relative"),
    "memorizing": Setting(_store, "relative"),
    "memory_transformer": Setting(_tokens, "relative"),
    "read_twice": Setting(
        lambda setup: {"slots": setup.length, "first_read": "running", "scope": "earlier"}, positions="relative"
    ),
    "rmt": Setting(_tokens, "relative"),
    "segatron": Setting(),
    "streaming_llm": Setting(lambda setup: {"length": setup.length - 4}),
    "tova": Setting(),
    "transformer_xl": Setting(),
    # Turned in pairs, queries and keys want heads of an even width, and those of XL-base have 41 channels.
    "ttt": Setting(lambda setup: {"rotary": setup.head_width % 2 == 0}, "relative"),
}
"""Language models: as many slots as the recipe's memory where a slot is a token, relative positions for all that have
none of their own. Memory tokens are 10, beside a Transformer-XL cache of the recipe's length, as arXiv:2207.06881 has
them in its comparison with Transformer-XL. A memory that is not named gets `Setting(positions="relative")`."""


def _row(name: str) -> Row:
    return Row(name, functools.partial(model_of, name=name), against=() if name == PAPER[0] else (PAPER[0],))


def _others(scale: str) -> Sequence[Row]:
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
