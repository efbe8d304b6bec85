"""Inputs and options of models: shapes, dtypes and ranges are refused alike by every model."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from common import refuses
from torch import Tensor, nn

from cached_lab.cli.main import main
from cached_lab.tasks.recipes import load_config
from cached_transformers import create_model
from cached_transformers.memories.grc import GatedRecurrentCache
from cached_transformers.models import LanguageModel
from cached_transformers.models.pvt import PyramidVisionTransformer
from cached_transformers.models.stack_options import StackOptions
from cached_transformers.registry import MODELS

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
    refuses(message, lambda: vision(**part)(IMAGES))


SIZES = ("width", "depth", "heads", "feed_forward")
SMALL = dict(zip(SIZES, (8, 1, 2, 12), strict=True))
NEEDED: dict[str, dict[str, Any]] = {
    "language_model": {"vocabulary": 7},
    "sequence_classifier": {"vocabulary": 7, "classes": 3, "max_length": 9},
    "vision_transformer": {"image_size": 8, "patch_size": 4},
    "encoder_decoder": {"vocabulary": 7},
}


@pytest.mark.parametrize("name", NEEDED)
def test_a_signature_names_every_option_once_with_default_and_type(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = MODELS.entry(name)
    options, hints = entry.options, typing.get_type_hints(entry.factory.__init__)
    assert not entry.open_ended and {*options} == hints.keys() - {"return"}
    first = [n for n, p in options.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert first[-4:] == list(SIZES)
    assert options["memory"].default is None and options["attention"].default == "softmax"
    assert hints["dropout"] is float and options["dropout"].annotation == "float"
    assert options["dropout"].default == {"encoder_decoder": 0.3}.get(name, 0.0)
    fields, own = typing.get_type_hints(StackOptions), {"head_width", *SIZES}  # the classifier's head has a head_width
    assert all(hints[option] == fields[option] for option in (options.keys() & fields.keys()) - own)
    assert main(["explain", name]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  memory: MemorySpec = None" in lines and "  attention: AttentionSpec = 'softmax'" in lines


def test_sizes_and_options_reach_the_stack_and_recipes_are_checked() -> None:
    model = LanguageModel(11, 16, 2, 2, 32, norm="post")
    torch.manual_seed(0)
    named = LanguageModel(vocabulary=11, width=16, depth=2, heads=2, feed_forward=32, norm="post")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), named.parameters(), strict=True))
    assert isinstance(model.stack.norm, torch.nn.Identity)
    refuses(r"model\.norm=3", load_config, "demo_text", ["model.norm=3"])
    cache = GatedRecurrentCache(4, 3)
    for rows, tokens in ((0, 5), (2, 0)):
        refuses(f"a batch of {rows} rows of {tokens} tokens has nothing to update", cache, torch.zeros(rows, tokens, 4))


@pytest.mark.parametrize("name", NEEDED)
def test_what_a_model_does_not_offer_is_refused(name: str) -> None:
    message = f"unknown option of model '{name}' 'dropuot'; did you mean 'dropout'"
    refuses(message, create_model, name, **NEEDED[name], dropuot=0.1)
    for option in {field.name for field in dataclasses.fields(StackOptions)} - MODELS.entry(name).options.keys():
        refuses(f"unknown option of model '{name}' '{option}'", create_model, name, **NEEDED[name], **{option: None})
    refuses(
        "'feed_forward_bias'", MODELS.entry(name).factory, **NEEDED[name], feed_forward_bias=False, raises=TypeError
    )


@pytest.mark.parametrize("name", NEEDED)
@pytest.mark.parametrize(
    ("options", "message"),
    [({"heads": 3}, "width=8 must be a positive multiple of heads=3"), ({"heads": 0}, "heads=0")],
)
def test_sizes_are_checked_alike_in_all_models(name: str, options: dict[str, int], message: str) -> None:
    refuses(message, create_model, name, **{**NEEDED[name], **SMALL, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "before"}, "norm='before' must be 'pre' or 'post'"),
        ({"norm_kind": "lair"}, "unknown norm_kind 'lair'; did you mean 'layer'"),
        ({"head_width": 0}, "head_width=0 must be at least 1; None is width / heads"),
    ],
)
def test_other_options_are_checked_too(options: dict[str, Any], message: str) -> None:
    refuses(message, StackOptions, **SMALL, **options)


@pytest.mark.parametrize("name", NEEDED)
def test_defaults_are_those_of_the_object_unless_a_model_changes_them(name: str) -> None:
    changed = {"activation": "relu", "dropout": 0.3, "activation_dropout": 0.0} if name == "encoder_decoder" else {}
    for field in dataclasses.fields(StackOptions)[len(SIZES) :]:
        option = MODELS.entry(name).options.get(field.name)
        assert option is None or option.default == changed.get(field.name, field.default)
