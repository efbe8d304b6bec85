"""Stack options: named with type and default in the signature of every model, and checked."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import pytest
import torch
from refusals import refuses

from cached_lab.cli.main import main
from cached_lab.tasks.recipes import load_config
from cached_transformers import create_model
from cached_transformers.models import LanguageModel
from cached_transformers.models.stack_options import StackOptions
from cached_transformers.registry import MODELS

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


def test_sizes_may_stand_without_their_names_and_options_reach_the_stack() -> None:
    model = LanguageModel(11, 16, 2, 2, 32, norm="post")
    torch.manual_seed(0)
    named = LanguageModel(vocabulary=11, width=16, depth=2, heads=2, feed_forward=32, norm="post")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), named.parameters(), strict=True))
    assert isinstance(model.stack.norm, torch.nn.Identity)


@pytest.mark.parametrize("name", NEEDED)
def test_what_a_model_does_not_offer_is_refused(name: str) -> None:
    message = f"unknown option of model '{name}' 'dropuot'; did you mean 'dropout'"
    refuses(message, create_model, name, **NEEDED[name], dropuot=0.1)
    for option in {field.name for field in dataclasses.fields(StackOptions)} - MODELS.entry(name).options.keys():
        refuses(f"unknown option of model '{name}' '{option}'", create_model, name, **NEEDED[name], **{option: None})
    refuses("'feed_forward_bias'", MODELS.entry(name).factory, **NEEDED[name], feed_forward_bias=False, error=TypeError)


@pytest.mark.parametrize("name", NEEDED)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, "width=8 must be a positive multiple of heads=3"),
        ({"heads": 0}, "heads=0"),
    ],
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


def test_a_recipe_is_checked_against_the_types() -> None:
    refuses(r"model\.norm=3", load_config, "demo_text", ["model.norm=3"])


@pytest.mark.parametrize("name", NEEDED)
def test_defaults_are_those_of_the_object_unless_a_model_changes_them(name: str) -> None:
    changed = {"activation": "relu", "dropout": 0.3, "activation_dropout": 0.0} if name == "encoder_decoder" else {}
    for field in dataclasses.fields(StackOptions)[len(SIZES) :]:
        option = MODELS.entry(name).options.get(field.name)
        assert option is None or option.default == changed.get(field.name, field.default)
