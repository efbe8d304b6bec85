"""Memory efficiency, the number that compares memories, and its control: a window whose state has as many bytes.

    efficiency = (score with the memory - score without) / (score with the whole text - score without)

0 is no better than no memory, 1 as good as attention over the whole text by the same weights, or by a twin trained so.
Perplexities count by their logarithms, since losses add up over tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any

from cached_lab.training.scores import goodness
from cached_transformers.memories.streaming_llm import StreamingLLM
from cached_transformers.memories.transformer_xl import TransformerXL
from cached_transformers.state import nbytes

NONE, WHOLE, WINDOW = "no memory", "whole text", "window"
"""The arms without a memory, each segment separately and attention over everything; and the window of a memory."""
NOTE = (
    f"Efficiency: (score - {NONE}) / ({WHOLE} - {NONE}), of perplexities by their logarithms; none where the {WHOLE} "
    f"is no better than {NONE}."
)


def efficiency(metric: str, score: float, without: float, whole: float) -> float | None:
    """Return the share of the gain of the whole text that a memory has; None if the whole text gains nothing.

    Args:
        metric: decides if higher scores are better.

    Raises:
        ValueError: a score is not finite, or a perplexity not above 0.
    """
    given = {"memory": score, NONE: without, WHOLE: whole}
    logarithmic = metric.endswith("perplexity")
    for name, value in given.items():
        if not math.isfinite(value) or (logarithmic and value <= 0):
            raise ValueError(
                f"{metric}={value} of {name}: an efficiency needs finite scores; repeat the run that diverged"
            )
    has, least, most = (goodness(metric, math.log(x) if logarithmic else x) for x in given.values())
    return (has - least) / (most - least) if most > least else None


def efficiencies(
    metric: str, scores: Mapping[str, float], without: str = NONE, whole: str = WHOLE
) -> dict[str, float | None]:
    """Return the efficiency of each score by name; None for all if one of the two bars is missing."""
    if not {without, whole} <= scores.keys():
        return dict.fromkeys(scores)
    return {name: efficiency(metric, score, scores[without], scores[whole]) for name, score in scores.items()}


def probe_rows(content: Mapping[str, Any], task: str) -> dict[str, list[Mapping[str, Any]]]:
    """Return the trainings of a task in probe.json or far.json, one per seed, by name: the arms without a memory, each
    memory within its reach, and its window."""
    found: dict[str, list[Mapping[str, Any]]] = {NONE: [], WHOLE: []}
    for memory in content["memories"]:
        found |= {memory: [], f"{WINDOW} of {memory}": []}
    for result in content["results"]:
        if result["task"] == task and result["arm"] != "out of reach":
            found[row_name(result["memory"], result["arm"])].append(result)
    return {name: trainings for name, trainings in found.items() if trainings}


def row_name(memory: str, arm: str) -> str:
    """Return the name of a training in tables."""
    return arm if memory == "none" else f"{WINDOW} of {memory}" if arm == WINDOW else memory


def probe_scores(content: Mapping[str, Any], trainings: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return shares of right answers at the farthest trained distance; a test that ended earlier counts as a guess."""
    if "far" not in content:
        return [training["accuracy"] for training in trainings]
    farthest = str(content["course"]["farthest"])
    return [training["far"].get(farthest, [training["chance"]])[0] for training in trainings]


def probe_efficiencies(content: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """Return efficiencies in probe.json or far.json, by task and name of `probe_rows`, from means over seeds."""
    found = {task: probe_rows(content, task).items() for task in content["tasks"]}
    scores = {task: {name: mean(probe_scores(content, t)) for name, t in rows} for task, rows in found.items()}
    return {task: efficiencies("accuracy", by_name) for task, by_name in scores.items()}


def window_of(memory: Any, build: Callable[[Any], Any], **options: Any) -> dict[str, Any] | None:
    """Return the longest window whose state has at most the bytes of a memory's state; None for a window itself.

    Args:
        memory: specification. build: returns the model with a memory. options: of the window.

    Raises:
        ValueError: the state is smaller than a window of one slot, or grows with the text.
    """
    model = build(memory).eval()
    if any(type(module) in (TransformerXL, StreamingLLM) and not module.sinks for module in model.modules()):
        return None
    if any(getattr(module, "grows", False) for module in model.modules()):
        raise ValueError(f"memory={memory!r}: its state grows with the text, and a window does not; give it a capacity")

    def window(length: int) -> dict[str, Any]:
        return {"name": "streaming_llm", "sinks": 0, **options, "length": length}

    most, one, two = (
        nbytes(m.init_state(1)) if hasattr(m, "init_state") else 0
        for m in (model, *(build(window(length)).eval() for length in (1, 2)))
    )
    if most < one:
        raise ValueError(f"memory={memory!r}: its state of {most:,} bytes is below the {one:,} of a window of one slot")
    return window(1 + (most - one) // (two - one))
