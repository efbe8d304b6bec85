"""Sizes must be whole numbers: at the constructors of models and at the doors of loops, streams and generation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cached_transformers import SegmentLoop, create_model, generate, read_stream
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
}
MORE: dict[str, Callable[[Any], Any]] = {
    "read_stream": lambda value: next(read_stream(model(), [[1, 2, 3]], value)),
    "Session": lambda value: Session(model(), segment_length=value),
}


@pytest.mark.parametrize("value", [2.5, math.nan, math.inf, True, "3"])
@pytest.mark.parametrize("option", DOORS)
def test_a_size_that_is_no_whole_number_is_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{option}={value!r} must be a whole number"):
        DOORS[option](value)


@pytest.mark.parametrize("value", [2.5, math.nan])
@pytest.mark.parametrize("door", MORE)
def test_segments_of_a_stream_have_a_whole_number_of_tokens(door: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"segment_length={value!r} must be a whole number"):
        MORE[door](value)


def test_whole_numbers_of_other_types_are_taken() -> None:
    at_least_one(size=torch.tensor(3).numpy()[()], other=torch.tensor(2), missing=None)  # numpy.int64
    with pytest.raises(ValueError, match="size=0 must be at least 1 token"):
        at_least_one(" token", size=0)
    with pytest.raises(ValueError, match="size=1 must be at least 2"):
        at_least_one(least=2, size=1)
