"""Type checks of options against annotations: of recipes and command lines, and of calls (`checked`).

Text is accepted for a `Path`, an integer for a `float`, and any list for another kind of list, since YAML has one kind
of each. A recipe must leave out an option whose annotation is not understood; a call may give it. (OmegaConf checks
dataclass fields only, not signatures of registered parts.)
"""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import functools
import inspect
import math
import pathlib
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

Target = TypeVar("Target", bound=Callable[..., Any])
LARGEST = 2**63 - 1
"""Integers must fit into 64-bit tensors."""
_LISTS = (list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
SIZES = {"width", "heads", "depth", "vocabulary", "classes", "channels", "patch_size", "feed_forward", "hidden"}
SIZES |= {"experts", "bptt", "passes", "tokens", "beams", "top_k"}
"""Options that are at least 1 in every signature."""
_CALLABLES = (typing.Callable, collections.abc.Callable)
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "null",
    None: "null",
}


def check_type(path: str, value: Any, expected: Any) -> Any:
    """Return `value` if it fits the annotation, as a `float` if one is expected.

    Raises:
        ValueError: it does not fit; the message gives path, value and expected type.
    """
    if not understood(expected):
        raise ValueError(f"{path}={shown(value)} can only be set in code, as {shown(expected)}; leave it out")
    if not fits(value, expected):
        raise ValueError(f"{path}={shown(value)} must be {describe(expected)}, not {_kind(value)}")
    return float(value) if expected is float else value


def understood(expected: Any) -> bool:
    """Return True if `fits` supports an annotation."""
    origin = get_origin(expected)
    if origin in (Union, types.UnionType, *_LISTS, *_MAPPINGS):
        return all(part is Ellipsis or understood(part) for part in get_args(expected))
    if origin is Literal or origin in _CALLABLES or expected in (Any, None, *_CALLABLES):
        return True
    return origin is None and inspect.isclass(expected) and not getattr(expected, "_is_protocol", False)


def fits(value: Any, expected: Any) -> bool:
    """Return True if a value fits an annotation that is `understood`."""
    origin, parts = get_origin(expected), get_args(expected)
    if origin in (Union, types.UnionType):
        return any(fits(value, option) for option in parts)
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in parts)
    if expected is Any:
        return True
    if origin in _CALLABLES or expected in _CALLABLES:
        return callable(value)
    if (origin or expected) in _LISTS:
        return _fits_items(value, expected)
    if (origin or expected) in _MAPPINGS:
        pairs = value.items() if isinstance(value, Mapping) else ()
        return isinstance(value, Mapping) and all(all(map(fits, pair, parts)) for pair in pairs)
    return value is None if expected is None else inspect.isclass(expected) and _is_one(value, expected)


def _fits_items(value: Any, expected: Any) -> bool:
    scalar = getattr(value, "shape", None) == ()
    if scalar or isinstance(value, str | bytes | Mapping) or not isinstance(value, collections.abc.Collection):
        return False  # text is not a list of letters
    parts = get_args(expected)
    if get_origin(expected) is tuple and Ellipsis not in parts:
        return len(value) == len(parts) and all(map(fits, value, parts))
    return not parts or all(fits(item, parts[0]) for item in value)


def _is_one(value: Any, expected: type) -> bool:
    """Return True for an instance of a class, or its form in YAML."""
    if expected in (int, float):
        value = python_number(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return abs(value) <= LARGEST
        return expected is float and isinstance(value, float) and math.isfinite(value)
    if expected is bool:
        value = python_number(value)
    if isinstance(value, str):
        return (expected is str or issubclass(expected, pathlib.PurePath)) and is_plain(value)
    return isinstance(value, expected)


def python_number(value: Any) -> Any:
    """Return the number in a scalar of numpy or torch, and any other value as it is."""
    with contextlib.suppress(RuntimeError):  # a tensor without values
        return value.item() if getattr(value, "shape", None) == () else value
    return value


def check_argument(path: str, value: Any, expected: Any) -> Any:
    """Return an argument of a call, as `check_type`; scalars of numpy and torch become Python numbers.

    An annotation that is not `understood` is not checked, an iterable is not read, and names of parts with their
    options are checked when the part is built.
    """
    kinds = [get_origin(part) or part for part in (expected, *get_args(expected))]
    if not understood(expected) or any(kind in kinds for kind in (collections.abc.Iterable, *_MAPPINGS)):
        return value
    value = python_number(value) if any(kind in kinds for kind in (int, float, bool)) else value
    check_type(path, value, expected)
    return value


def checked(target: Target) -> Target:
    """Check the arguments of a function, or of a class's constructor, against its annotations, as a decorator.

    Raises:
        ValueError: an argument that does not fit (`check_argument`), by the decorated function.
    """
    if inspect.isclass(target):
        target.__init__ = checked(target.__init__)  # type: ignore[method-assign, misc]
        return target
    names = list(inspect.signature(target).parameters)

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        hints = hints_of(target)

        def fitting(name: str, value: Any) -> Any:
            value = check_argument(name, value, hints.get(name, Any))
            if isinstance(value, int) and ((value >= 2**31 and name != "seed") or (value < 1 and name in SIZES)):
                raise ValueError(f"{name}={value} must be at least 1, and less than 2**31")
            if isinstance(value, float) and 3e38 < abs(value) < math.inf:
                raise ValueError(f"{name}={value} is not a number of 32 bits")
            return value

        args = tuple(map(fitting, names, args)) + args[len(names) :]
        return target(*args, **{name: fitting(name, value) for name, value in kwargs.items()})

    return call  # type: ignore[return-value]


def describe(expected: Any) -> str:
    """Describe an annotation."""
    origin, parts = get_origin(expected), get_args(expected)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(describe, parts)))
    if origin is Literal:
        return "one of " + ", ".join(map(repr, parts))
    if origin is None and inspect.isclass(expected):
        return _WORDS.get(expected, f"a {expected.__name__}")
    return _WORDS.get(expected) or re.sub(r"\b(typing|collections\.abc|pathlib)\.", "", str(expected))


def _kind(value: Any) -> str:
    """Describe the type of a value that does not fit."""
    if isinstance(value, int) and abs(value) > LARGEST:
        return "one of more than 64 bits"
    return "not-a-number" if isinstance(value, float) and math.isnan(value) else type(value).__name__


def is_plain(text: str) -> bool:
    """Return True for text without null characters and lone surrogates, which can be written and name a file."""
    return "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)


def shown(value: object, longest: int = 200) -> str:
    """Return the `repr` of a value for a message, shortened if long."""
    text = repr(value)
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 4 :]}"


@functools.cache
def hints_of(factory: Callable[..., Any]) -> dict[str, Any]:
    """Return resolved annotations of the parameters of a function or class, or of the fields of a dataclass.

    Annotations with names imported only for type checking stay text, which is not `understood`. A parameter without
    annotation accepts everything.
    """
    target: Any = factory
    if inspect.isclass(factory) and not dataclasses.is_dataclass(factory):
        target = factory.__init__  # type: ignore[misc]
    written = {name: option.annotation for name, option in inspect.signature(factory).parameters.items()}
    try:
        found = typing.get_type_hints(target)
    except NameError:
        found = {}
        for name, annotation in written.items():
            with contextlib.suppress(NameError):
                one = types.SimpleNamespace(__annotations__={name: annotation}, __wrapped__=target)
                found |= typing.get_type_hints(one)
    return {name: Any if a is inspect.Parameter.empty else found.get(name, a) for name, a in written.items()}
