"""Options of GRC: what does not fit is refused when the memory is built, in words that name the way out."""

from __future__ import annotations

import math
from typing import Any

import pytest
from grc.small_vit import small_vit

from cached_transformers import create_model
from cached_transformers.memories.convolution import ConvolutionControl
from cached_transformers.memories.grc.grc import GRC
from cached_transformers.memories.grc.shared_cache import caches


@pytest.mark.parametrize(
    "options, message",
    [
        ({"ratio": 0}, r"ratio=0 must lie in \(0, 1\]"),
        ({"ratio": 1.5}, r"ratio=1.5 must lie in \(0, 1\]"),
        ({"ratio": math.nan}, r"ratio=nan must lie in \(0, 1\]"),
        ({"ratio": 0.1}, r"1 channels, which heads=2 do not divide; with width=16 these ratios work: 0.125, 0.25"),
        ({"ratio": 0.2}, r"cache of 3 channels, which heads=2 do not divide"),
        ({"ratio": 0.375, "positional_convolution": True}, r"16 into 6 groups, .*; choose a ratio of 1 / n"),
        ({"variant": "relesed"}, r"unknown GRC variant 'relesed'; did you mean 'released'"),
        ({"candidate": "relu"}, r"candidate='relu' must be one of norm, tanh, affine"),
        ({"interpolation": "cubic"}, r"interpolation='cubic' must be one of nearest, linear, area"),
        ({"attend": "all"}, r"attend='all' must be one of mean, sample"),
        ({"source": "x"}, r"source='x' must be one of input, output"),
        ({"mix": "x"}, r"mix='x' must be one of heads, outputs"),
        ({"combine": "x"}, r"combine='x' must be one of pad, project"),
        ({"sync": "x"}, r"sync='x' must be one of broadcast, mean, none"),
        ({"combine": "project", "variant": "released"}, r"combine='project' needs mix='heads'"),
        ({"size": (2, 3)}, r"length=5 must equal size 2 x 3 \+ prefix 0"),
        ({"length": 0}, r"length=0 must be at least 1 slot"),
        ({"stride": 0}, r"stride=0 must be at least 1; 1 is a slot for every token"),
        ({"stride": 2}, r"stride=2"),
        ({"stride": 2, "size": (2, 3)}, r"length=5 must equal size 2 x 3 \+ prefix 0"),
    ],
)
def test_what_does_not_fit_is_refused_at_construction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRC(16, 2, **{"length": 5, **options})


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match=r"width=16.*heads=3"):
        GRC(16, 3, 5)


@pytest.mark.parametrize("ratio", [k / 8 for k in range(1, 9)])
def test_ratios_that_fit_are_exact(ratio: float) -> None:
    assert GRC(16, 2, 5, ratio=ratio).cache.cache_MC.shape == (5, round(16 * ratio))


def test_a_causal_model_refuses_the_shared_cache_and_names_the_causal_form() -> None:
    with pytest.raises(ValueError, match="grc_stream"):
        create_model("language_model", vocabulary=8, width=16, depth=1, heads=2, feed_forward=16, memory="grc")


def test_caches_finds_every_layer() -> None:
    assert len(list(caches(small_vit()))) == 2


@pytest.mark.parametrize("sequence", [False, True])
def test_groups_of_the_convolution_control_divide_the_width(sequence: bool) -> None:
    with pytest.raises(ValueError, match=r"convolution: ratio=0.2 makes \d+ groups, which do not divide width=16"):
        ConvolutionControl(16, 1, ratio=0.2, sequence=sequence)
