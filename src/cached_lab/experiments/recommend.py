"""Recommendations: the memory for a need, its bytes on a host model, and the result that supports it.

`ADVICE` is the only table of advice: the README, the page "Which memory?" and `cached recommend` show its rows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from cached_transformers import add_memory
from cached_transformers.extras import require
from cached_transformers.integrations.hub import records_memory
from cached_transformers.registry import MEMORIES
from cached_transformers.state import nbytes

from .hosts import OURS, answer_to
from .pretrained import explained, located

RESULTS, SMALLEST = "docs/results", 4
"""Pages of proofs; the divisor of the measured length that gives the smallest one to recommend."""


class Advice(NamedTuple):
    """A memory for one need; of a task, the first row that fits is the advice.

    Attributes:
        need: in words. memory: name and options; its `length`, given or by default, is the measured one.
        result: of the measurement, in words. proof: page of results and section.
    """

    task: str
    need: str
    memory: dict[str, Any]
    result: str
    proof: str


ADVICE = (
    Advice(
        "text",
        "lower perplexity, trained with the model",
        {"name": "compressive", "length": 16, "compressed": 8},
        "beats as many parameters, and a window of its bytes, on two novels",
        "text.md#real-text-does-carrying-pay",
    ),
    Advice(
        "text",
        "lower perplexity, trained longer, fewer parameters",
        {"name": "transformer_xl", "length": 64},
        "beats as many parameters, and segments twice as long",
        "text.md#longer-training",
    ),
    Advice(
        "text",
        "lower perplexity of a pretrained decoder, memory trained",
        {"name": "ahn", "length": 124, "sinks": 4, "relative": False},
        "beats LoRA and a window of its bytes",
        "long-texts.md#trained-beside-it",
    ),
    Advice(
        "text",
        "lower perplexity of a pretrained decoder in a few kB",
        {"name": "rmt", "preset": "trained"},
        "beats LoRA, though another text's memory serves as well",
        "long-texts.md#trained-beside-it",
    ),
    Advice(
        "stream",
        "endless text through a pretrained decoder, untrained",
        {"name": "streaming_llm", "keep": "kv", "length": 508},
        "near the whole text, and past its trained length",
        "long-texts.md#past-the-trained-length",
    ),
    Advice(
        "recall",
        "facts of a long text by a pretrained decoder, untrained",
        {"name": "block_retrieval", "retrieve": "prompts", "block": 32, "topk": 8},
        "finds pass keys at any length; no bounded state does",
        "long-texts.md#pass-keys",
    ),
    Advice(
        "recall",
        "facts of a long text, trained",
        {"name": "memorizing", "length": 4096},
        "finds a cue among thousands of tokens",
        "remembers.md#by-distance",
    ),
    Advice(
        "state",
        "one thing for ever, in constant bytes",
        {"name": "grc_stream", "preset": "long"},
        "holds a symbol for a million tokens, in every seed",
        "remembers.md#by-distance",
    ),
    Advice(
        "state",
        "one thing for ever, in the fewest bytes",
        {"name": "rmt"},
        "holds it for 100,000 tokens, in ten seeds of ten",
        "remembers.md#by-distance",
    ),
    Advice(
        "pairs",
        "keys with values, far beyond the trained length",
        {"name": "titans"},
        "keeps pairs at ten times the trained distance",
        "remembers.md#recent-memories-holding-order-pairs",
    ),
    Advice(
        "pairs",
        "keys with values, and order",
        {"name": "ttt"},
        "keeps order better and pairs nearly as well",
        "remembers.md#recent-memories-holding-order-pairs",
    ),
    Advice(
        "documents",
        "questions about documents of many segments",
        {"name": "rmt"},
        "finds a fact in a million tokens",
        "text.md#a-million-tokens",
    ),
    Advice(
        "images",
        "frames of one scene, a cache of each row",
        {"name": "grc_stream", "preset": "long"},
        "recovers half of what missing parts would give",
        "images.md#a-cache-of-each-row-on-images",
    ),
    Advice(
        "images",
        "single images, a cache of all rows",
        {"name": "grc"},
        "gains in the paper; no effect at our sizes",
        "images.md#does-the-cache-help-digits-and-listops",
    ),
)
TASKS = tuple(dict.fromkeys(row.task for row in ADVICE))


class Fitted(NamedTuple):
    """A row of advice on a host.

    Attributes:
        memory: with the `length` that fits the budget. state_bytes: of a batch row; None where the state grows.
        reason: why it does not fit; "" if it does.
    """

    advice: Advice
    memory: dict[str, Any]
    state_bytes: int | None
    reason: str


def in_words(advice: Advice) -> str:
    """Return the memory of a row with its options, for tables."""
    name, *options = advice.memory.items()
    given = ", ".join(f"{option}={value!r}" for option, value in options).replace("'", '"')
    return f"`{name[1]}`" + (f" (`{given}`)" if given else "")


def recommend(task: str, host: str, budget: int | None = None) -> Iterator[Fitted]:
    """Yield the advice for a task on a host model, in order, each with its state at the size that fits.

    Args:
        host: a kind of model as in `answer_to`, or a pretrained model of transformers by folder or name.
        budget: bytes of the state of a batch row, at most; None for no limit.

    Raises:
        ValueError: an unknown task or host.
    """
    if task not in TASKS:
        raise ValueError(f"task={task!r} must be one of {', '.join(TASKS)}")
    kind, config = _host(host)
    for advice in (row for row in ADVICE if row.task == task):
        taken = answer_to(kind, MEMORIES.entry(advice.memory["name"]))
        memory = {**advice.memory, **taken.options}
        if taken.reason or config is None:
            yield Fitted(advice, memory, None, taken.reason)
            continue
        size, reason = _state(config, memory), ""
        if budget is not None and size is None:
            reason = "its state grows with the text"
        elif budget is not None and size is not None and size > budget:
            memory, size, reason = _shrunk(config, memory, size, budget)
        yield Fitted(advice, memory, size, reason)


def _host(name: str) -> tuple[str, Any]:
    """Return the kind of a host, and its config; None for kinds without sizes of their own."""
    if name in (*OURS, "torch.nn", "timm"):
        return name, None
    auto = require("transformers", extra="language").AutoConfig
    try:
        config = auto.for_model(name)
    except ValueError:
        place, options = located(name)
        with explained(name):
            config = auto.from_pretrained(place, trust_remote_code=False, **options)
    if records_memory(config):
        raise ValueError(f"host={name}: it has a memory already; give the model without one")
    return config.model_type, config


def _state(config: Any, memory: dict[str, Any]) -> int | None:
    """Count the bytes of a batch row's state, in float32 unless the config says otherwise; None if it grows."""
    auto, config = require("transformers", extra="language"), copy.deepcopy(config)  # a host's config names its memory
    with torch.device("meta"):
        model = add_memory(auto.AutoModel.from_config(config), memory, segment_length=None).eval()
    if any(getattr(module, "grows", False) for module in model.modules()):
        return None
    return nbytes(model.init_memory_state(1)) if hasattr(model, "init_memory_state") else 0


def _shrunk(config: Any, memory: dict[str, Any], size: int, budget: int) -> tuple[dict[str, Any], int, str]:
    """Return the memory with the largest `length` that fits the budget, its bytes, and the reason if none does."""
    options = MEMORIES.entry(memory["name"]).options
    if "length" not in options:
        return memory, size, f"its state has {size:,} bytes, and no option makes it smaller"
    one, two = (_state(config, {**memory, "length": length}) or 0 for length in (1, 2))
    length, measured = 1 + (budget - one) // max(1, two - one), memory.get("length", options["length"].default)
    if (least := -(-measured // SMALLEST)) > length:
        takes = one + (least - 1) * (two - one)
        return memory, size, f"length={least}, a quarter of the measured one, takes {takes:,} bytes"
    memory = {**memory, "length": length}
    return memory, _state(config, memory) or 0, ""
