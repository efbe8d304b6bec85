"""Descriptions of options from docstrings, for the command line."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, get_origin

_PACKAGE = __name__.partition(".")[0]


def meanings(factory: Callable[..., Any], options: Iterable[str]) -> dict[str, str]:
    """Return the descriptions of options in the docstring of a class or function, by name.

    One line may describe several options (`width: D. heads: H.`). References (``bias: see `Branch` ``,
    ``others: see ...``, ``Args: as `Branch` ``) and base classes are followed.
    """
    found = {name: _meaning(factory, name) for name in options}
    return {name: text for name, text in found.items() if text}


def _meaning(source: Any, name: str, depth: int = 4) -> str:
    """Return the description of one option; a reference itself only if it leads nowhere."""
    left = ""
    for kind in _sources(source) if depth else ():
        section = _section(kind)
        said = _split(section)
        text = said.get(name) or said.get("others") or said.get("options") or ""
        if not text and section.startswith("as `"):
            text = section
        if text and not text.startswith(("see `", "as `", "of the stack")):
            return text
        others = (_meaning(other, name, depth - 1) for other in _referred(text, kind.__module__))
        elsewhere = next(filter(None, others), "")
        if elsewhere:
            return elsewhere
        left = left or (text if name in said else "")
    return left


def _sources(factory: Callable[..., Any]) -> Iterator[Any]:
    """Yield the factory and, for a class, its bases in this package or in the factory's."""
    yield factory
    if inspect.isclass(factory):
        yield from (kind for kind in factory.__mro__[1:] if _searched(kind.__module__, factory.__module__))


def _searched(module: str, origin: str) -> bool:
    """Return True for a module of this package, or of the package that `origin` is in."""
    return module.partition(".")[0] in (_PACKAGE, origin.partition(".")[0])


def _section(factory: Any) -> str:
    """Return the `Args:` section of a docstring on one line."""
    own = vars(factory).get("__doc__") if inspect.isclass(factory) else factory.__doc__
    lines = inspect.cleandoc(own or "").splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith("Args:")), None)
    if first is None:
        return ""
    rest = [lines[first].removeprefix("Args:"), *lines[first + 1 :]]
    end = next((number for number, line in enumerate(rest[1:], 1) if line and not line.startswith(" ")), len(rest))
    return " ".join(" ".join(rest[:end]).split())


def _split(section: str) -> dict[str, str]:
    """Split a section into descriptions by option; several names may precede one colon."""
    parts = re.split(r"(?:^|(?<=[.;] ))(\w+(?:, \w+)*): ", section)
    return {
        one: text.strip(" ;") for many, text in zip(parts[1::2], parts[2::2], strict=True) for one in many.split(", ")
    }


def _referred(text: str, module: str) -> Iterator[Any]:
    """Yield the classes and functions of this package that a text names; among equal names the nearest to `module`."""
    for name in re.findall(r"`(\w+)`", text):
        found = {
            f"{there.__module__}.{there.__qualname__}": there
            for key, m in list(sys.modules.items())
            if _searched(key, module) and (inspect.isclass(there := vars(m).get(name)) or inspect.isfunction(there))
        }
        if found:
            shared = {path: sum(map(str.__eq__, path.split("."), module.split("."))) for path in found}
            yield found[min(found, key=lambda path: (-shared[path], path))]


def spelt_out(annotation: str, factory: Callable[..., Any]) -> str:
    """Replace names of `Literal` types in an annotation by their values."""
    names = vars(sys.modules[factory.__module__])

    def values(match: re.Match[str]) -> str:
        kind = names.get(match.group())
        return repr(kind).removeprefix("typing.") if get_origin(kind) is Literal else match.group()

    return re.sub(r"\b[A-Za-z_]\w*\b(?!['\"])", values, annotation)
