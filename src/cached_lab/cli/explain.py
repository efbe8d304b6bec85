"""`cached explain`: equations, state, cost and options of a registered part; the pattern of an attention.

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

from .list import parts

FACTS = ("equations", "state", "cost", "gradient")
"""Keys of an entry's `info` that come first."""
ARGUMENTS = (
    ("name NAME", str, "a name from `cached list`"),
    ("overrides option=value*", str, "with --plot: options of the attention"),
    ("--plot FILE", Path, "draw the keys that each query of an attention attends to (.png, .svg, .pdf)"),
    ("--tokens N", 64, "with --plot: length of the sequence"),
    ("--draws B", 4, "with --plot: random queries and keys"),
)


def run(arguments: argparse.Namespace) -> int:
    """Print every part of that name (a memory and a model may share one), and draw the attention with --plot."""
    every, name = parts(), arguments.name
    found = [(LISTED[kind].kind, group[name]) for kind, group in every.items() if name in group]
    if not found:
        raise ValueError(unknown_name("name", name, [known for group in every.values() for known in group]))
    if arguments.plot is not None:
        from cached_lab.experiments.reports.figures.attention_patterns import pattern_figure
        from cached_lab.experiments.reports.figures.style import save
        from cached_lab.yaml_tree import apply_override

        spec = {"name": name}
        for override in arguments.overrides:
            apply_override(spec, override)
        save(pattern_figure(spec, arguments.tokens, draws=arguments.draws), arguments.plot)
    print("\n\n".join(explain(kind, part) for kind, part in found))
    return 0


def explain(kind: str, part: Mapping[str, Any]) -> str:
    """The description of one part, from `Entry.facts`."""
    lines, info = [f"{part['name']} ({kind})", part["summary"]], part["info"]
    lines += [f"paper: {part['paper']}"] if part["paper"] else []
    for key in sorted(info, key=lambda key: FACTS.index(key) if key in FACTS else len(FACTS)):
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
