"""Tables of the GRC paper (arXiv:2312.12742) as comparisons: `cached reproduce NAME` runs one of `REPRODUCTIONS`.

A reproduction is a recipe for each scale, and rows: memories with the options that make them comparable. Everything
else, the tokens and the seeds among it, is the recipe's, and sizes are made equal by `cli.variants.equal_parameters`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .config import RunConfig
from .probes.settings import stream_memories
from .registry import MEMORIES


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
class Row:
    """One line of a table.

    Attributes:
        options: of the memory; None gives it the recipe's length if it has that option.
        positions: position scheme of the model; None takes the memory's own.
        model: other options of the model that the memory cannot do without.
    """

    options: Callable[[Setup], dict[str, Any]] | None = None
    positions: str | None = None
    model: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reproduction:
    """One table.

    Attributes:
        summary: what it compares, in a line.
        recipes: recipe by scale.
        files: what the data folder must hold, by scale.
        paper: memories of the paper's table; the first is what the others are compared with.
        others: names of the memories that may be added.
        rows: how memories are set; one that is not named gets `Row(positions="relative")`.
    """

    summary: str
    recipes: Mapping[str, str]
    files: Mapping[str, str]
    paper: tuple[str, ...]
    others: Callable[[], list[str]]
    rows: Mapping[str, Row]

    def names(self, every: bool) -> list[str]:
        """Memories of the table, those of the paper first."""
        more = [name for name in self.others() if name not in self.paper] if every else []
        return [*self.paper, *more]

    def config(self, recipe: RunConfig, name: str) -> RunConfig:
        """The recipe with the memory of one row.

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
        row = self.rows.get(name, Row(positions="relative"))
        if row.options is not None:
            options = row.options(setup)
        else:
            options = {"length": setup.length} if "length" in MEMORIES.entry(name).options else {}
        positions = {} if row.positions is None else {"positions": row.positions}
        return dataclasses.replace(
            recipe, model={**recipe.model, **positions, **row.model, "memory": {"name": name, **options}}
        )


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


LANGUAGE_ROWS = {
    "compressive": Row(_compressive),
    "crtn": Row(_crtn),
    "ernie_doc": Row(),
    # Its positions have no biases; and since no token attends itself, one whose embedding is small drowns in what it
    # attends: without the scale perplexity stays that of the unigram model.
    "feedback": Row(model={"shared_biases": False, "scale_embedding": True}),
    "grc_stream": Row(_grc, "relative"),
    "infinity_former": Row(_signal),
    "memformer": Row(lambda setup: {"length": 32}, "relative"),
    "memorizing": Row(_store, "relative"),
    "memory_transformer": Row(_tokens, "relative"),
    "read_twice": Row(
        lambda setup: {"slots": setup.length, "first_read": "running", "scope": "earlier"}, positions="relative"
    ),
    "rmt": Row(_tokens, "relative"),
    "segatron": Row(),
    "transformer_xl": Row(),
}
"""Language models: as many slots as the recipe's memory where a slot is a token, relative positions for all that have
none of their own. Memory tokens are 10, beside a Transformer-XL cache of the recipe's length, as arXiv:2207.06881 has
them in its comparison with Transformer-XL."""

REPRODUCTIONS = {
    "table5": Reproduction(
        summary="language modelling: Transformer-XL, Memory Transformer, RMT and GRC at equal size",
        recipes={"small": "table5_small", "paper": "table5_paper"},
        files={"small": "WikiText-2", "paper": "WikiText-103"},
        paper=("transformer_xl", "memory_transformer", "rmt", "grc_stream"),
        others=stream_memories,
        rows=LANGUAGE_ROWS,
    ),
}
