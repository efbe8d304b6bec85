"""Sizes must be whole numbers: at the constructors of models and at the doors of loops, streams and generation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusals import refuses

from cached_transformers import SegmentLoop, add_memory, create_model, generate, read_stream, resize_caches
from cached_transformers.checks import at_least_one
from cached_transformers.models.session import Session

SIZES: dict[str, Any] = {"vocabulary": 11, "width": 8, "depth": 1, "heads": 2, "feed_forward": 8}
TOKENS = torch.zeros(1, 3, dtype=torch.long)


def model(**options: Any) -> Any:
    return create_model("language_model", **{**SIZES, **options})


DOORS: dict[str, Callable[[Any], Any]] = {
    "segment_length": lambda value: SegmentLoop(model(), value),
    "bptt": lambda value: SegmentLoop(model(), 2, bptt=value),
    "passes": lambda value: SegmentLoop(model(), 2, passes=value),
    "tokens": lambda value: generate(model(), TOKENS, tokens=value),
    "beams": lambda value: generate(model(), TOKENS, tokens=1, beams=value),
    "top_k": lambda value: generate(model(), TOKENS, tokens=1, top_k=value),
    "depth": lambda value: model(depth=value),
    "vocabulary": lambda value: model(vocabulary=value),
    "short_convolution": lambda value: model(short_convolution=value),
    "batch_size": lambda value: model().init_state(value),
    "segment_length in a stream": lambda value: next(read_stream(model(), [[1, 2, 3]], value)),
    "segment_length of a session": lambda value: Session(model(), segment_length=value),
}


@pytest.mark.parametrize("value", [2.5, math.nan, math.inf, True, "3"])
@pytest.mark.parametrize("option", DOORS)
def test_a_size_that_is_no_whole_number_is_refused_by_name(option: str, value: Any) -> None:
    refuses(rf"{option.split()[0]}={value!r} must be a whole number", DOORS[option], value)


def test_whole_numbers_of_other_types_are_taken() -> None:
    at_least_one(size=torch.tensor(3).numpy()[()], other=torch.tensor(2), missing=None)  # numpy.int64
    refuses("size=0 must be at least 1 token", at_least_one, " token", size=0)
    refuses("size=1 must be at least 2", at_least_one, least=2, size=1)


INPUTS: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
    "inputs": (lambda ids: model()(ids), [None, [[1, 2]], TOKENS.numpy(), TOKENS[0], TOKENS.float(), TOKENS[:, :0]]),
    "inputs of a loop": (lambda ids: SegmentLoop(model(), 2)(ids, TOKENS), [None, [[1, 2]], TOKENS[:0], TOKENS[:, :0]]),
    "target": (lambda ids: SegmentLoop(model(), 2)(TOKENS, ids), [None, TOKENS + 11, TOKENS.float(), TOKENS[:, 1:]]),
    "padding": (lambda pads: SegmentLoop(model(), 2)(TOKENS, TOKENS, padding=pads), [TOKENS, [[True] * 3]]),
    "reset": (lambda rows: SegmentLoop(model(), 2)(TOKENS, TOKENS, reset=rows), [TOKENS[:, 0], [True], TOKENS > 3]),
    "prompt": (lambda ids: generate(model(), ids, tokens=1), [None, [[1]], TOKENS[:, :0], TOKENS[:0], TOKENS[0]]),
    "pieces": (lambda pieces: next(read_stream(model(), pieces, 2)), [None, [1, 2, 3], 3, ["text"]]),
    "token": (lambda pieces: next(read_stream(model(), pieces, 2)), [[[0, 99]], [[99, 0]], [[0.5, 1.0]]]),
}


@pytest.mark.parametrize(("door", "value"), [(door, value) for door, (_, odd) in INPUTS.items() for value in odd])
def test_odd_and_empty_inputs_are_refused_by_name(door: str, value: Any) -> None:
    refuses(door.split()[0], INPUTS[door][0], value)


def test_caches_have_at_least_one_slot() -> None:
    host = add_memory(torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), "grc", length=3)
    for length in (0, -1, 2.5):
        with pytest.raises(ValueError, match=f"length={length}"):
            resize_caches(host, length)  # type: ignore[arg-type]
    refuses("no shared cache", resize_caches, model(), 4)
