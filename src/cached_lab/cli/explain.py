"""`cached explain NAME`: what a registered part does, from its registry entry and its signature.

With `--plot FILE` an attention also draws which keys each query attends.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cached_lab.registries import LISTED
from cached_transformers.registry import unknown_name

from .list import parts

FACTS = ("equations", "state", "cost", "gradient")
"""Keys of an entry's `info` that come first, in this order."""


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "explain",
        help="equations, state, cost and options of a registered part; the pattern of an attention",
        epilog="example: cached explain bp_transformer k=2 --tokens 48 --plot bp_transformer.png",
    )
    parser.add_argument("name", help="a name from `cached list`")
    parser.add_argument("overrides", nargs="*", metavar="option=value", help="options of the attention to be drawn")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw which keys each query of an attention attends (.png, .svg, .pdf)",
    )
    parser.add_argument("--tokens", type=int, metavar="N", help="length of the sequence to be drawn (default: 64)")
    parser.add_argument(
        "--draws", type=int, metavar="B", help="random queries and keys to take the mean of (default: 4)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print every part of that name (a memory and a model may share one), and draw the attention if asked."""
    every = parts()
    found = [(LISTED[kind].kind, group[arguments.name]) for kind, group in every.items() if arguments.name in group]
    if not found:
        raise ValueError(unknown_name("name", arguments.name, [name for group in every.values() for name in group]))
    if arguments.plot is not None and arguments.name not in every["attentions"]:
        raise ValueError(f"--plot draws attentions, and {arguments.name!r} is none; see `cached list attentions`")
    figure = None if arguments.plot is None else _draw(arguments)
    drawing = {"--tokens": arguments.tokens, "--draws": arguments.draws, "option=value": arguments.overrides or None}
    for option, value in drawing.items():
        if figure is None and value is not None:
            raise ValueError(f"{option} is for the figure of an attention; add --plot FILE, or leave out {value}")
    print("\n\n".join(explain(kind, part) for kind, part in found))
    if figure is not None:
        from cached_lab.experiments.reports.figures.style import save

        print(f"\nwritten: {save(figure, arguments.plot)}")
    return 0


def _draw(arguments: argparse.Namespace) -> Any:
    """The figure of an attention."""
    from cached_lab.experiments.reports.figures.attention_patterns import DRAWS, TOKENS, pattern_figure
    from cached_lab.experiments.reports.figures.style import SUFFIXES
    from cached_lab.yaml_tree import apply_override
    from cached_transformers.registry import ATTENTIONS

    if arguments.plot.suffix.lower() not in SUFFIXES:  # before the work, not after it
        raise ValueError(f"--plot {arguments.plot} must end in one of {', '.join(SUFFIXES)}")
    spec = {"name": arguments.name}
    for override in arguments.overrides:
        apply_override(spec, override)
    options = ATTENTIONS.with_preset(arguments.name, {key: value for key, value in spec.items() if key != "name"})
    ATTENTIONS.check(arguments.name, options, "")
    tokens = TOKENS if arguments.tokens is None else arguments.tokens
    return pattern_figure(spec, tokens, draws=DRAWS if arguments.draws is None else arguments.draws)


def explain(kind: str, part: Mapping[str, Any]) -> str:
    """The text about one part, from what `Entry.facts` gives."""
    lines, info = [f"{part['name']} ({kind})", part["summary"]], part["info"]
    if part["paper"]:
        lines.append(f"paper: {part['paper']}")
    for key in [key for key in FACTS if key in info] + [key for key in info if key not in FACTS]:
        lines += ["", f"{key.replace('_', ' ')}:", *_indented(info[key])]
    lines += ["", "options:", *([] if part["options"] else ["  none"])]
    for option in part["options"]:
        meaning = part["meanings"].get(option.partition(":")[0].partition(" ")[0], "")
        lines += [f"  {option}", *textwrap.wrap(meaning, 100, initial_indent="      ", subsequent_indent="      ")]
    for name, options in part["presets"].items():
        lines.append(f"  preset: {name} = {', '.join(f'{key}={value}' for key, value in options.items())}")
    if part["open_ended"]:
        lines.append("  ... and whatever the wrapped library accepts")
    return "\n".join(lines)


def _indented(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [f"  {key}: {item}" for key, item in value.items()]
    items = value if isinstance(value, (list, tuple)) else str(value).splitlines()
    return [f"  {item}" for item in items]
