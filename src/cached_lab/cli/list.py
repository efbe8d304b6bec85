"""`cached list`: the names of all registered parts and recipes; for one kind also papers and summaries."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from cached_lab.registries import LISTED
from cached_lab.resources import read_facts, recipes_folder
from cached_transformers.interfaces.capabilities import PLACES, in_words

from .arguments import add_command

FACTS = {"memories": ("insertion", "cost", "reach"), "attentions": ("order", "can"), "probes": ("chance",)}
"""Facts of a kind besides name, summary and paper."""
KINDS = (*LISTED, "recipes")
DESCRIPTION = re.compile(r"^description:.*(?:\n[ \t].*)*", re.MULTILINE)
"""One key of a recipe with its value; parsing all recipes takes longer than the rest of the command."""


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    kinds = "list memories, attentions, models, datasets, objectives, probe tasks and recipes"
    parser = add_command(subparsers, "list", run, kinds)
    parser.add_argument("kind", nargs="?", choices=KINDS, help="one kind, with its facts (default: names of all kinds)")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(arguments: argparse.Namespace) -> int:
    """Print the list."""
    kinds = (arguments.kind,) if arguments.kind else KINDS
    found = parts()
    rows = {kind: recipe_rows() if kind == "recipes" else part_rows(found[kind], FACTS.get(kind, ())) for kind in kinds}
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return 0
    from rich.columns import Columns
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    if not arguments.kind:
        for kind in kinds:
            names = Columns([row["name"] for row in rows[kind]])
            console.print(f"[bold]{kind}[/bold] ({len(rows[kind])})", names, sep="\n")
        console.print("\n`cached list KIND` tells more, `cached explain NAME` everything")
        return 0
    kind = arguments.kind
    table = Table(title=kind, title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("name", no_wrap=True)
    table.add_column("summary")
    table.add_column("paper", no_wrap=True)
    for row in rows[kind]:
        # Facts go below the summary: as columns they would be a few letters wide on a narrow terminal.
        facts = [f"[dim]{fact}:[/dim] {escape(row[fact])}" for fact in FACTS.get(kind, ()) if row[fact]]
        table.add_row(row["name"], "\n".join([escape(row["summary"]), *facts]), row["paper"] or "")
    console.print(table)
    console.print()
    return 0


def parts() -> dict[str, dict[str, dict[str, Any]]]:
    """Facts of all parts by kind and name: the package's own from a file, and those registered in this process."""
    from_file, found = read_facts(), {}
    for kind, registry in LISTED.items():
        found[kind] = {facts["name"]: facts for facts in from_file[kind]}
        found[kind] |= {entry.name: entry.facts() for entry in registry if entry.name not in found[kind]}
    return found


def part_rows(group: Mapping[str, dict[str, Any]], facts: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Name, summary and paper of each part, and some of its facts."""
    return [
        {key: part[key] for key in ("name", "summary", "paper")} | {fact: fact_of(part, fact) for fact in facts}
        for _, part in sorted(group.items())
    ]


def recipe_rows() -> list[dict[str, Any]]:
    """Name and description of each recipe."""
    from cached_lab.yaml_tree import parse_yaml

    rows = []
    for path in sorted(recipes_folder().glob("*.yaml")):
        found = DESCRIPTION.search(path.read_text(encoding="utf-8"))
        tree = {} if found is None else parse_yaml(found.group(), str(path))
        rows.append({"name": path.stem, "summary": tree.get("description", ""), "paper": None})
    return rows


def fact_of(part: Mapping[str, Any], fact: str) -> Any:
    """A fact of a part's registration or class: "insertion" names the places of a memory, "can" is a phrase."""
    stated = part["stated"]
    if fact == "insertion":
        return ", ".join(name for word, name in PLACES.items() if word in stated.get("needs", ())) or "none"
    value = part["info"].get(fact, stated.get(fact))
    return in_words(value) if fact == "can" and isinstance(value, list) else value
