"""Inputs of models: wrong shapes, dtypes and ranges are refused alike by every model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusals import refuses
from torch import Tensor, nn

from cached_transformers import create_model
from cached_transformers.memories.grc import GatedRecurrentCache
from cached_transformers.models.pvt import PyramidVisionTransformer

V, ROWS, N = 7, 2, 6
STACK = {"width": 8, "depth": 1, "heads": 2, "feed_forward": 8}
IDS = torch.arange(ROWS * N).view(ROWS, N) % V
IMAGES = torch.zeros(ROWS, 3, 8, 8)


def classifier(**options: Any) -> nn.Module:
    return create_model("sequence_classifier", vocabulary=V, classes=3, max_length=N, **STACK, **options)


def vision(**options: Any) -> nn.Module:
    return create_model("vision_transformer", image_size=8, patch_size=4, classes=3, **STACK, **options)


def language() -> nn.Module:
    return create_model("language_model", vocabulary=V, **STACK)


def translation() -> nn.Module:
    return create_model("encoder_decoder", vocabulary=V, max_length=N, **STACK)


def pyramid() -> nn.Module:
    sizes: dict[str, Any] = {"embed_dims": (4, 4), "num_heads": (1, 1), "mlp_ratios": (1, 1), "depths": (1, 1)}
    return PyramidVisionTransformer(img_size=8, patch_size=2, num_classes=2, **sizes, sr_ratios=(1, 1))


STRANGE_IDS: dict[str, tuple[Tensor, str]] = {
    "floats": (IDS.float(), "dtype torch.float32 must be token ids"),
    "bytes": (IDS.to(torch.uint8), "dtype torch.uint8 must be token ids"),
    "bools": (IDS > 2, "dtype torch.bool must be token ids"),
    "one row": (IDS[0], r"shape \(6,\)"),
    "no row": (IDS[:0], r"shape \(0, 6\)"),
    "no token": (IDS[:, :0], r"shape \(2, 0\)"),
    "too large": (IDS + 1, f"a token id is not in a vocabulary of {V} tokens, 0 to 6"),
    "negative": (IDS - 1, "a token id is not in a vocabulary"),
}


@pytest.mark.parametrize("strange", STRANGE_IDS)
@pytest.mark.parametrize("make", [classifier, language, translation])
def test_ids(make: Callable[[], nn.Module], strange: str) -> None:
    ids, message = STRANGE_IDS[strange]
    more = (torch.zeros(len(ids), N, dtype=torch.long),) if make is translation else ()
    refuses(message, make(), ids, *more)


@pytest.mark.parametrize("make", [classifier, language, translation])
def test_padding(make: Callable[[], nn.Module]) -> None:
    more = (IDS,) if make is translation else ()
    with pytest.raises(ValueError, match=r"padding of shape \(2, 5\) must have the shape of the inputs, \(2, 6\)"):
        make()(IDS, *more, padding=torch.zeros(ROWS, N - 1, dtype=torch.bool))
    refuses(r"torch\.int64", make(), IDS, *more, padding=torch.zeros(ROWS, N, dtype=torch.long))


@pytest.mark.parametrize("make", [language, translation])
def test_targets(make: Callable[[], nn.Module]) -> None:
    more = (IDS,) if make is translation else ()
    for targets, message in (
        (IDS.float(), "torch.float32 .*int64"),
        (IDS.to(torch.int32), "torch.int32 .*int64"),
        (IDS[:, 1:], r"targets of shape \(2, 5\)"),
        (IDS - 1, "a target is not in -100"),
    ):
        refuses(message, make(), IDS, *more, targets=targets)


@pytest.mark.parametrize("make", [classifier, vision])
def test_a_carried_state(make: Callable[..., nn.Module]) -> None:
    model, inputs = make(memory="grc_stream"), IDS if make is classifier else IMAGES
    state = model(inputs).state
    model(inputs, state)
    refuses(r"the state has 2 rows .*, the segment 1", model, inputs[:1], state)
    for other in ({"name": "grc_stream", "ratio": 1.0}, None):
        refuses("the state is that of another model", make(memory=other), inputs, state)


@pytest.mark.parametrize("make", [vision, pyramid])
def test_images(make: Callable[[], nn.Module]) -> None:
    for images, message in (
        (IMAGES[:0], "at least one"),
        (IMAGES[0], r"images of shape \(3, 8, 8\)"),
        (IMAGES[:, :1], "this model takes"),
        (IMAGES.to(torch.uint8), "dtype torch.uint8 must be floating"),
    ):
        refuses(message, make(), images)


def test_a_cache_is_not_updated_by_nothing() -> None:
    cache = GatedRecurrentCache(4, 3)
    for rows, tokens in ((0, 5), (2, 0)):
        refuses(f"a batch of {rows} rows of {tokens} tokens has nothing to update", cache, torch.zeros(rows, tokens, 4))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"memory": {"name": "grc", "window": [0, 7]}}, r"window=\[0, 7\] must be \(height, width\)"),
        ({"memory": {"name": "grc", "window": [2, 2]}}, r"window=\[2, 2\] is of 4 tokens, but 5 tokens read 5 slots"),
        ({"memory": {"name": "grc_stream", "dropout": -0.5}}, r"dropout=-0\.5 must lie in \[0, 1\]"),
        ({"attention": {"name": "longformer", "dilation": []}}, r"dilation=\[\] must be at least 1"),
        ({"dropout": 2.0}, r"dropout=2\.0 must lie in \[0, 1\]"),
    ],
)
def test_options_out_of_range(part: dict[str, Any], message: str) -> None:
    refuses(message, vision(**part), IMAGES)
