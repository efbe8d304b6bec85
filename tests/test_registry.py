"""Registries: names, suggestions, and what is refused before anything is built."""

from __future__ import annotations

import math
import re
from typing import Any, Literal, get_origin

import numpy as np
import pytest
import torch
from refusals import refuses

import cached_transformers
from cached_transformers.annotations import SIZES, hints_of
from cached_transformers.registry import ATTENTIONS, MEMORIES, Registry


class Thing:
    """A thing with a size.

    More about it.
    """

    def __init__(self, width: int, *, ratio: float = 0.5) -> None:
        self.width, self.ratio = width, ratio


@pytest.fixture
def things() -> Registry[Any]:
    registry: Registry[Any] = Registry("thing")
    registry.register("thing", paper="arXiv:0000.00000", state="none")(Thing)

    @registry.register("thing_open")
    def make(width: int = 1, **options: Any) -> tuple[int, dict[str, Any]]:
        return width, options

    return registry


def test_create_passes_arguments_on(things: Registry[Any]) -> None:
    built = things.create("thing", 4, ratio=0.25)
    assert (built.width, built.ratio) == (4, 0.25)
    assert things.create("thing_open", extra=2) == (1, {"extra": 2})


def test_entries_describe_themselves(things: Registry[Any]) -> None:
    entry = things.entry("thing")
    assert (entry.summary, entry.paper) == ("A thing with a size.", "arXiv:0000.00000")
    assert dict(entry.info) == {"state": "none"}
    assert list(entry.options) == ["width", "ratio"] and entry.options["ratio"].default == 0.5
    assert not entry.open_ended and things.entry("thing_open").open_ended
    assert list(things.entry("thing_open").options) == ["width"]
    assert things.entry("thing_open").summary == ""


def test_names_are_sorted(things: Registry[Any]) -> None:
    assert things.register("another")(Thing) is Thing
    assert things.names() == ["another", "thing", "thing_open"] == [entry.name for entry in things]
    assert "thing" in things and "Thing" not in things and len(things) == 3


def test_an_unknown_name_is_refused_with_the_nearest(things: Registry[Any]) -> None:
    refuses(r"'thinh'.*'thing'.*thing_open", things.create, "thinh")
    refuses(r"^unknown thing 'zebra' \(known: thing, thing_open\)$", things.entry, "zebra")
    refuses("known: none", Registry("part").entry, "x")


def test_an_unknown_option_is_refused_before_anything_is_built(things: Registry[Any]) -> None:
    refuses(r"'thing'.*'ration'.*'ratio'", things.create, "thing", ration=0.25)
    things.check("thing_open", {"anything": 1})


def test_a_name_is_given_once(things: Registry[Any]) -> None:
    refuses("'thing'", things.register("thing"), object)
    assert things.entry("thing").factory is Thing


def test_a_preset_sets_options_that_the_caller_may_still_override() -> None:
    things: Registry[Any] = Registry("thing")

    @things.register("box", presets={"long": {"size": 9, "lid": False}})
    def box(size: int = 1, lid: bool = True) -> tuple[int, bool]:
        return size, lid

    @things.register("bag")
    def bag(size: int = 1) -> int:
        return size

    assert things.with_preset("box", {"preset": "long", "size": 3}) == {"size": 3, "lid": False}
    assert things.with_preset("box", {"size": 3}) == {"size": 3}
    assert things.entry("box").facts()["presets"] == {"long": {"size": 9, "lid": False}}
    refuses(r"'box'.*'lang'.*'long'", things.with_preset, "box", {"preset": "lang"})
    refuses(r"'bag'.*preset='long'", things.with_preset, "bag", {"preset": "long"})


@pytest.mark.parametrize("registry", [MEMORIES, ATTENTIONS], ids=lambda registry: registry.kind)
def test_presets_are_options_that_their_parts_take(registry: Registry[Any]) -> None:
    for entry in registry:
        for name, options in entry.presets.items():
            assert registry.with_preset(entry.name, {"preset": name}) == dict(options)
            registry.check(entry.name, options, path="")


WHOLE, REAL = [2.5, math.nan, True, "3"], [math.nan, math.inf, True, "3"]
ODD: dict[Any, list[Any]] = {int: WHOLE, int | None: WHOLE, float: REAL, float | None: REAL, bool: [1, "yes"]}
"""Annotations, and values that do not fit them."""


@pytest.mark.parametrize("name", ["MEMORIES", "ATTENTIONS", "MODELS"])
def test_a_constructor_refuses_values_that_do_not_fit_its_annotations(name: str) -> None:
    for entry in getattr(cached_transformers, name):
        for option, hint in hints_of(entry.factory).items():
            odd = ["?"] if get_origin(hint) is Literal else ODD.get(hint, [])
            for value in odd + ([0, -1, 10**12] if option in SIZES and odd is WHOLE else []):
                refuses(rf"{option}={re.escape(repr(value))}", entry.factory, **{option: value})


def test_numbers_of_numpy_and_torch_become_numbers_of_python() -> None:
    memory = MEMORIES.entry("transformer_xl").factory(np.int64(8), torch.tensor(2), length=np.int32(4))
    assert type(memory.length) is int and memory.length == 4
    refuses("length=tensor", MEMORIES.create, "transformer_xl", 8, 2, length=torch.tensor(4, device="meta"))
