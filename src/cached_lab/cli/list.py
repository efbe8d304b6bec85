"""`cached list`: the names of everything that is registered, and of the recipes; of one kind papers and first lines."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from cached_lab.registries import LISTED
from cached_lab.resources import read_facts, recipes_folder
from cached_transformers.interfaces.capabilities import PLACES, in_words

FACTS = {
    "memories": ("insertion", "cost", "reach"),
    "attentions": ("order", "can"),
    "probes": ("chance",),
}
"""What is said of a kind beside name, summary and paper."""
KINDS = (*LISTED, "recipes")
DESCRIPTION = re.compile(r"^description:.*(?:\n[ \t].*)*", re.MULTILINE)
"""One key of a recipe with its value; reading all of all recipes takes longer than the rest of the command."""


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "list", help="list memories, attentions, models, datasets, objectives, probe tasks and recipes"
    )
    parser.add_argument("kind", nargs="?", choices=KINDS, help="one kind, with all that is said of it (default: names)")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(run=run)


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
            console.print(
                f"[bold]{kind}[/bold] ({len(rows[kind])})", Columns([row["name"] for row in rows[kind]]), sep="\n"
            )
        console.print("\n`cached list KIND` tells more, `cached explain NAME` everything")
        return 0
    for kind in kinds:
        table = Table(title=kind, title_justify="left", box=None, pad_edge=False, header_style="bold")
        table.add_column("name", no_wrap=True)
        table.add_column("what it is")
        table.add_column("paper", no_wrap=True)
        facts = FACTS.get(kind, ())
        for row in rows[kind]:
            # Below the summary: as columns they would leave a few letters to each on a narrow terminal.
            lines = [
                escape(row["summary"]),
                *(f"[dim]{fact}:[/dim] {escape(row[fact])}" for fact in facts if row[fact]),
            ]
            table.add_row(row["name"], "\n".join(lines), row["paper"] or "")
        console.print(table)
        console.print()
    return 0


def parts() -> dict[str, dict[str, dict[str, Any]]]:
    """Facts of all parts by kind and name: the package's own from a file, beside what this process has registered."""
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
    """What a part's registration or its class says, in the words of the list.

    That is of a memory the usual names of the places where it stands, of an attention what it can as a phrase.
    """
    stated = part["stated"]
    if fact == "insertion":
        return ", ".join(name for word, name in PLACES.items() if word in stated.get("needs", ())) or "none"
    value = part["info"].get(fact, stated.get(fact))
    return in_words(value) if fact == "can" and isinstance(value, list) else value
