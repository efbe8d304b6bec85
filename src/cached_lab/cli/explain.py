"""`cached explain NAME`: describe a registered part from its registry entry and signature.

With `--plot FILE` an attention also draws the keys that each query attends to.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cached_lab.registries import LISTED
from cached_transformers.registry import unknown_name

from .arguments import add_command
from .list import parts

FACTS = ("equations", "state", "cost", "gradient")
"""Keys of an entry's `info` that come first, in this order."""


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = add_command(
        subparsers,
        "explain",
        run,
        "equations, state, cost and options of a registered part; the pattern of an attention",
        epilog="example: cached explain bp_transformer k=2 --tokens 48 --plot bp_transformer.png",
    )
    parser.add_argument("name", help="a name from `cached list`")
    parser.add_argument("overrides", nargs="*", metavar="option=value", help="with --plot: options of the attention")
    plot = "draw the keys that each query of an attention attends to (.png, .svg, .pdf)"
    parser.add_argument("--plot", type=Path, metavar="FILE", help=plot)
    parser.add_argument("--tokens", type=int, metavar="N", help="with --plot: length of the sequence (default: 64)")
    parser.add_argument("--draws", type=int, metavar="B", help="with --plot: random queries and keys (default: 4)")


def run(arguments: argparse.Namespace) -> int:
    """Print every part of that name (a memory and a model may share one), and draw the attention with --plot."""
    every, name = parts(), arguments.name
    found = [(LISTED[kind].kind, group[name]) for kind, group in every.items() if name in group]
    if not found:
        raise ValueError(unknown_name("name", name, [known for group in every.values() for known in group]))
    if arguments.plot is not None and name not in every["attentions"]:
        raise ValueError(f"--plot draws attentions, and {name!r} is none; see `cached list attentions`")
    drawing = {"--tokens": arguments.tokens, "--draws": arguments.draws, "option=value": arguments.overrides or None}
    for option, value in drawing.items():
        if arguments.plot is None and value is not None:
            raise ValueError(f"{option} is for the figure of an attention; add --plot FILE, or leave out {value}")
    figure = None if arguments.plot is None else _draw(arguments)
    print("\n\n".join(explain(kind, part) for kind, part in found))
    if figure is not None:
        from cached_lab.experiments.reports.figures.style import save

        print(f"\nwritten: {save(figure, arguments.plot)}")
    return 0


def _draw(arguments: argparse.Namespace) -> Any:
    from cached_lab.experiments.reports.figures.attention_patterns import DRAWS, TOKENS, pattern_figure
    from cached_lab.experiments.reports.figures.style import check_suffix
    from cached_lab.yaml_tree import apply_override
    from cached_transformers.registry import ATTENTIONS

    check_suffix("--plot", arguments.plot)
    spec = {"name": arguments.name}
    for override in arguments.overrides:
        apply_override(spec, override)
    options = ATTENTIONS.with_preset(arguments.name, {key: value for key, value in spec.items() if key != "name"})
    ATTENTIONS.check(arguments.name, options, "")
    tokens = TOKENS if arguments.tokens is None else arguments.tokens
    return pattern_figure(spec, tokens, draws=DRAWS if arguments.draws is None else arguments.draws)


def explain(kind: str, part: Mapping[str, Any]) -> str:
    """The description of one part, from `Entry.facts`."""
    lines, info = [f"{part['name']} ({kind})", part["summary"]], part["info"]
    if part["paper"]:
        lines.append(f"paper: {part['paper']}")
    for key in [key for key in FACTS if key in info] + [key for key in info if key not in FACTS]:
        value = info[key]
        if isinstance(value, Mapping):
            value = [f"{name}: {item}" for name, item in value.items()]
        items = value if isinstance(value, (list, tuple)) else str(value).splitlines()
        lines += ["", f"{key.replace('_', ' ')}:", *(f"  {item}" for item in items)]
    lines += ["", "options:", *([] if part["options"] else ["  none"])]
    for option in part["options"]:
        meaning = part["meanings"].get(option.partition(":")[0].partition(" ")[0], "")
        lines += [f"  {option}", *textwrap.wrap(meaning, 100, initial_indent="      ", subsequent_indent="      ")]
    for name, options in part["presets"].items():
        lines.append(f"  preset: {name} = {', '.join(f'{key}={value}' for key, value in options.items())}")
    if part["open_ended"]:
        lines.append("  ... and all options of the wrapped library")
    return "\n".join(lines)
