"""Sizes must be whole numbers, wherever a user gives one; files are written whole; registries name what they know."""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_origin

import numpy as np
import pytest
import torch
from common import refuses

import cached_transformers
from cached_lab.training.metrics import MetricsFile
from cached_transformers import SegmentLoop, add_memory, create_model, generate, read_stream, resize_caches
from cached_transformers.annotations import SIZES, hints_of
from cached_transformers.checks import at_least_one
from cached_transformers.files import NotWritten, write_whole
from cached_transformers.models.session import Session
from cached_transformers.registry import ATTENTIONS, MEMORIES, Registry

SMALL: dict[str, Any] = {"vocabulary": 11, "width": 8, "depth": 1, "heads": 2, "feed_forward": 8}
TOKENS = torch.zeros(1, 3, dtype=torch.long)


def model(**options: Any) -> Any:
    return create_model("language_model", **{**SMALL, **options})


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


def test_other_whole_numbers_are_taken_and_caches_have_a_slot() -> None:
    at_least_one(size=torch.tensor(3).numpy()[()], other=torch.tensor(2), missing=None)  # numpy.int64
    refuses("size=0 must be at least 1 token", at_least_one, " token", size=0)
    refuses("size=1 must be at least 2", at_least_one, least=2, size=1)
    host = add_memory(torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), "grc", length=3)
    for length in (0, -1, 2.5):
        refuses(f"length={length}", resize_caches, host, length)
    refuses("prefix=-1", add_memory, torch.nn.TransformerEncoderLayer(8, 2, 8), "convolution", prefix=-1)
    host = add_memory(torch.nn.TransformerEncoderLayer(8, 2, 8), "convolution", prefix=16)
    refuses("prefix=16", host, torch.zeros(2, 6, 8))
    refuses("no shared cache", resize_caches, model(), 4)


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


def test_a_file_is_written_when_it_changes_and_a_vanished_folder_named(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    write_whole(path, b"one")
    first = path.stat().st_ino, path.stat().st_mtime_ns
    write_whole(path, b"one")
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == first
    write_whole(path, iter([b"t", b"wo"]))
    assert path.read_bytes() == b"two"
    assert os.listdir(tmp_path) == ["config.yaml"]
    refuses(r"gone/report\.html", write_whole, tmp_path / "gone" / "report.html", b"page", raises=NotWritten)
    assert not issubclass(NotWritten, FileNotFoundError)


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    process = os.fork()
    if not process:
        os._exit(0)
    os.waitpid(process, 0)
    names = [f"{platform.node()}.{process}", f"{platform.node()}.{os.getppid()}", "mine"]
    left, *kept = [path.with_name(f".{path.name}.{name}.partial") for name in names]
    for file in (left, *kept):
        file.touch()
    write_whole(path, b"{}")
    assert sorted(tmp_path.iterdir()) == sorted([path, *kept])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_names_the_metrics_and_says_what_is_safe(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path.parent, 0)
    metrics._file.close()
    metrics._file = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115
    with pytest.raises(NotWritten, match=r"metrics\.jsonl") as error:
        metrics.write({"step": 1})
    assert "checkpoints are untouched, and the same command goes on" in str(error.value)
    refuses(r"metrics\.jsonl", metrics.close, raises=NotWritten)


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


def test_a_registry_creates_sorts_and_refuses(things: Registry[Any]) -> None:
    built = things.create("thing", 4, ratio=0.25)
    assert (built.width, built.ratio) == (4, 0.25)
    assert things.create("thing_open", extra=2) == (1, {"extra": 2})
    refuses(r"'thinh'.*'thing'.*thing_open", things.create, "thinh")
    refuses(r"^unknown thing 'zebra' \(known: thing, thing_open\)$", things.entry, "zebra")
    refuses("known: none", Registry("part").entry, "x")
    refuses(r"'thing'.*'ration'.*'ratio'", things.create, "thing", ration=0.25)
    things.check("thing_open", {"anything": 1})
    refuses("'thing'", things.register("thing"), object)
    assert things.entry("thing").factory is Thing
    assert things.register("another")(Thing) is Thing
    assert things.names() == ["another", "thing", "thing_open"] == [entry.name for entry in things]
    assert "thing" in things and "Thing" not in things and len(things) == 3


def test_entries_describe_themselves_and_take_numbers_of_numpy(things: Registry[Any]) -> None:
    entry = things.entry("thing")
    assert (entry.summary, entry.paper) == ("A thing with a size.", "arXiv:0000.00000")
    assert dict(entry.info) == {"state": "none"}
    assert list(entry.options) == ["width", "ratio"] and entry.options["ratio"].default == 0.5
    assert not entry.open_ended and things.entry("thing_open").open_ended
    assert list(things.entry("thing_open").options) == ["width"]
    assert things.entry("thing_open").summary == ""
    memory = MEMORIES.entry("transformer_xl").factory(np.int64(8), torch.tensor(2), length=np.int32(4))
    assert type(memory.length) is int and memory.length == 4
    refuses("length=tensor", MEMORIES.create, "transformer_xl", 8, 2, length=torch.tensor(4, device="meta"))


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
