"""`cached explain NAME`: what a registered part does, from its registry entry and its signature."""

from __future__ import annotations

import argparse
import inspect
from typing import Any

from cached_transformers.cli.list import registries
from cached_transformers.registry import Entry, unknown_name

FACTS = ("equations", "state", "cost", "gradient")
"""Keys of an entry's `info` that come first, in this order."""


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser("explain", help="equations, state, cost and options of a registered part")
    parser.add_argument("name", help="a name from `cached list`")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print every part of that name (a memory and a model may share one)."""
    found = [(r.kind, r.entry(arguments.name)) for r in registries().values() if arguments.name in r]
    if not found:
        known = [name for registry in registries().values() for name in registry.names()]
        raise ValueError(unknown_name("name", arguments.name, known))
    print("\n\n".join(explain(kind, entry) for kind, entry in found))
    return 0


def explain(kind: str, entry: Entry[Any]) -> str:
    """The text about one part."""
    lines = [f"{entry.name} ({kind})", entry.summary]
    if entry.paper:
        lines.append(f"paper: {entry.paper}")
    order = [key for key in FACTS if key in entry.info] + [key for key in entry.info if key not in FACTS]
    for key in order:
        lines += ["", f"{key.replace('_', ' ')}:", *_indented(entry.info[key])]
    lines += ["", "options:"]
    lines += [f"  {describe_option(option)}" for option in entry.options.values()] or ["  none"]
    if entry.open_ended:
        lines.append("  ... and whatever the wrapped library accepts")
    return "\n".join(lines)


def describe_option(option: inspect.Parameter) -> str:
    """Name, annotation and default of one option."""
    kind = "" if option.annotation is option.empty else f": {_annotation(option.annotation)}"
    default = "   (required, or given by the model)" if option.default is option.empty else f" = {option.default!r}"
    return f"{option.name}{kind}{default}"


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _indented(value: Any) -> list[str]:
    items = value if isinstance(value, (list, tuple)) else str(value).splitlines()
    return [f"  {item}" for item in items]
