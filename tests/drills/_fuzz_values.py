"""Random values for options from their annotations: most fit, some do not, and some are not values."""

from __future__ import annotations

import collections.abc
import inspect
import pathlib
import random
import re
import types
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import yaml

WHOLE = [1, 2, 4, 8, 3, 0, -1, 7, 16, 10**6, 10**12, 2**63, 10**30]
REAL = [0.0, 0.1, 0.5, 1.0, 1, 2, -0.5, 1e-300, 1e300, float("inf"), float("-inf"), float("nan")]
OTHER: list[Any] = [None, True, False, 1.5, "x", "3", "", "2024-01-01", 2024, [], {}, [1, [2]], {"a": 1}]
OTHER += [{"name": "grc"}, {"name": None}, [None], ["x"], "é中\u202e🙂", "x" * 20_000, "..", "~", "none", "auto"]
TAGS = ("bool x", "timestamp x", "int x", "float x", "binary x", "set {a}", "null 1", "seq x", "map x", "str [1]")
MARKS = """
!!python/object:os.system x|&a [*a]|*x|[|{|]|"\\ud800"|"\\0"|'|1:30|0x1F|017|.nan|-.inf|~|yes|>|? a|{<<: {a: 1}}
%YAML 1.1|---|...|a: b: c|{a: 1, a: 2}|{[1]: 2}|2024-01-01T00:00:00Z|1e999|# only a comment|@|`|!|!x y|&|*|[1,,2]
{1: 2}|{true: 1}
"""
TRICKS = [f"!!{tag}" for tag in TAGS] + MARKS.strip().replace("\n", "|").split("|")
TRICKS += ["9" * 5000, "[" * 3000, "{a: " * 300, "|", "\t", "", "\x00", "\ud800", "\ufeff1"]


class Text(NamedTuple):
    """Raw YAML text."""

    yaml: str


def words_of(factory: Any) -> list[str]:
    """Return quoted words in a docstring and a signature: likely values of text options."""
    text = f"{inspect.getdoc(factory) or ''} {getattr(factory, '__init__', factory).__doc__ or ''}"
    found = re.findall(r"[\"'`]([a-z0-9_]+)[\"'`]", text)
    defaults = [p.default for p in inspect.signature(factory).parameters.values() if isinstance(p.default, str)]
    return sorted({*found, *defaults})


def fitting(expected: Any, rng: random.Random, words: list[str], paths: list[str]) -> Any:
    """A value that an annotation allows; whether the part does is for it to say."""
    origin, parts = get_origin(expected), [part for part in get_args(expected) if part is not Ellipsis]
    if origin in (Union, types.UnionType):
        return fitting(rng.choice(parts), rng, words, paths)
    if origin is Literal:
        return rng.choice(parts)
    if expected in (None, type(None)):
        return None
    if expected is bool:
        return rng.random() < 0.5
    if expected is int:
        return rng.choice(WHOLE[:9]) if rng.random() < 0.9 else rng.choice(WHOLE)
    if expected is float:
        return rng.choice(REAL[:7]) if rng.random() < 0.9 else rng.choice(REAL)
    if inspect.isclass(expected) and issubclass(expected, pathlib.PurePath):
        return rng.choice(paths)
    if expected is str:
        return rng.choice(words + paths[:1]) if words and rng.random() < 0.8 else rng.choice([*paths, "x", "", "é"])
    if (origin or expected) in (dict, collections.abc.Mapping):
        of = parts[1] if len(parts) == 2 else Any
        keys = ["name", "train", "validation", "test", "a", "every", "experts", "number"]
        return {rng.choice(keys): fitting(of, rng, words, paths) for _ in range(rng.randrange(3))}
    if origin in (list, tuple, collections.abc.Sequence, collections.abc.Iterable):
        return [fitting(parts[0] if parts else Any, rng, words, paths) for _ in range(rng.choice([0, 1, 2, 2, 3]))]
    return rng.choice([*OTHER, *words])


def drawn(expected: Any, rng: random.Random, words: list[str], paths: list[str], wrong: float) -> Any:
    """A value that fits, or with probability `wrong` any other, or `Text` that is no value of YAML."""
    luck = rng.random()
    if luck >= wrong:
        return fitting(expected, rng, words, paths)
    return Text(rng.choice(TRICKS)) if luck < wrong / 3 else rng.choice([*OTHER, *WHOLE, *REAL])


def as_yaml(value: Any) -> str:
    """One line of YAML."""
    if isinstance(value, Text):
        return value.yaml
    return yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True).removesuffix("...\n").strip()
