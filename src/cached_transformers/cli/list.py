"""`cached list`: names, papers and first lines of everything that is registered, and the recipes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cached_transformers.registry import ATTENTIONS, DATASETS, MEMORIES, MODELS, OBJECTIVES, Registry
from cached_transformers.resources import recipes_folder
from cached_transformers.seam.memory import STANDS
from cached_transformers.yaml_tree import parse_yaml

FACTS = {"memories": ("insertion", "cost", "reach"), "attentions": ("order", "can")}
"""What is said of a kind beside name, summary and paper."""
KINDS = ("memories", "attentions", "models", "datasets", "objectives", "recipes")


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser("list", help="list memories, attentions, models, datasets, objectives and recipes")
    parser.add_argument("kind", nargs="?", choices=KINDS, help="one kind only (default: all)")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the list."""
    kinds = (arguments.kind,) if arguments.kind else KINDS
    rows = {
        kind: recipe_rows() if kind == "recipes" else part_rows(registries()[kind], FACTS.get(kind, ()))
        for kind in kinds
    }
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return 0
    console = Console(highlight=False)
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


def registries() -> dict[str, Registry[Any]]:
    """All registries by the word of the command line, filled."""
    # Importing the packages fills the registries.
    from cached_transformers import attentions, data, memories, models  # noqa: F401

    return {
        "memories": MEMORIES,
        "attentions": ATTENTIONS,
        "models": MODELS,
        "datasets": DATASETS,
        "objectives": OBJECTIVES,
    }


def part_rows(registry: Registry[Any], facts: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Name, summary and paper of each registered part, and facts from its registration or its class."""
    return [
        {"name": entry.name, "summary": entry.summary, "paper": entry.paper}
        | {fact: entry.info.get(fact, _of_class(entry.factory, fact)) for fact in facts}
        for entry in registry
    ]


def _of_class(kind: Any, fact: str) -> Any:
    from cached_transformers.seam.attention import in_words

    if fact == "insertion":
        return ", ".join(name for word, name in STANDS.items() if word in getattr(kind, "needs", ())) or "none"
    value = getattr(kind, fact, None)
    return in_words(value) if isinstance(value, frozenset) else value


def recipe_rows() -> list[dict[str, Any]]:
    """Name and description of each recipe."""
    rows = []
    for path in sorted(recipes_folder().glob("*.yaml")):
        tree = parse_yaml(path.read_text(encoding="utf-8"), str(path))
        rows.append({"name": path.stem, "summary": tree.get("description", ""), "paper": None})
    return rows
