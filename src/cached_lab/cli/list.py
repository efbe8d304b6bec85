"""`cached list`: names of memories, attentions, models, datasets, objectives, probe tasks and recipes."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from cached_lab.registries import LISTED
from cached_lab.resources import read_facts, recipes_folder
from cached_transformers.interfaces.capabilities import PLACES, in_words

FACTS = {"memories": ("insertion", "cost", "reach"), "attentions": ("order", "can"), "probes": ("chance",)}
"""Facts of a kind besides name, summary and paper."""
KINDS = (*LISTED, "recipes")
DESCRIPTION = re.compile(r"^description:.*(?:\n[ \t].*)*", re.MULTILINE)
"""One key of a recipe with its value; parsing all recipes takes longer than the rest of the command."""
ARGUMENTS = (
    ("kind KIND?", (None, *KINDS), "one kind, with its facts (default: names of all kinds)"),
    ("--host HOST", "", "memories that a model takes: llama, gpt2, bert, vit, t5, timm, torch.nn, language_model, ..."),
    ("--json", bool, "machine-readable output"),
)


def run(arguments: argparse.Namespace) -> int:
    """Print the list."""
    if arguments.host:
        return _print_host(arguments)
    rows = {kind: _rows(kind) for kind in ((arguments.kind,) if arguments.kind else KINDS)}
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return 0
    from rich.columns import Columns
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for kind, found in rows.items():
        if not arguments.kind:
            console.print(f"[bold]{kind}[/bold] ({len(found)})", Columns([row["name"] for row in found]), sep="\n")
            continue
        table = Table(title=kind, title_justify="left", box=None, pad_edge=False, header_style="bold")
        for column in ("name", "summary", "paper"):
            table.add_column(column, no_wrap=column != "summary")
        for row in found:
            # Facts go below the summary: as columns they would be a few letters wide on a narrow terminal.
            facts = [f"{fact}: {row[fact]}" for fact in FACTS.get(kind, ()) if row[fact]]
            table.add_row(row["name"], Text("\n".join([row["summary"], *facts])), row["paper"] or "")
        console.print(table)
    console.print("\n`cached list KIND` tells more, `cached explain NAME` everything")
    return 0


def _print_host(arguments: argparse.Namespace) -> int:
    """Print the memories that a kind of model takes, and the reasons against the others."""
    from cached_lab.experiments.hosts import answer_to
    from cached_transformers.registry import MEMORIES

    if arguments.kind not in (None, "memories"):
        raise ValueError(f"--host={arguments.host} tells about memories, not {arguments.kind}; list memories")
    found = {entry.name: answer_to(arguments.host, entry) for entry in MEMORIES}
    if arguments.json:
        print(json.dumps({name: answer._asdict() for name, answer in found.items()}, indent=1))
        return 0
    for name, (options, reason) in found.items():
        given = ", ".join(f"{option}={value!r}" for option, value in options.items())
        print(f"{name:18}", f"no: {reason}" if reason else f"yes, with {given}" if given else "yes")
    return 0


def parts() -> dict[str, dict[str, dict[str, Any]]]:
    """Facts of all parts by kind and name: the package's own from a file, and those registered in this process."""
    from_file, found = read_facts(), {}
    for kind, registry in LISTED.items():
        found[kind] = {facts["name"]: facts for facts in from_file[kind]}
        found[kind] |= {entry.name: entry.facts() for entry in registry if entry.name not in found[kind]}
    return found


def _rows(kind: str) -> list[dict[str, Any]]:
    """Name, summary and paper of each part of a kind, and some of its facts."""
    if kind == "recipes":
        from cached_lab.yaml_tree import parse_yaml

        rows = []
        for path in sorted(recipes_folder().glob("*.yaml")):
            found = DESCRIPTION.search(path.read_text(encoding="utf-8"))
            tree = {} if found is None else parse_yaml(found.group(), str(path))
            rows.append({"name": path.stem, "summary": tree.get("description", ""), "paper": None})
        return rows
    facts = FACTS.get(kind, ())
    return [
        {key: part[key] for key in ("name", "summary", "paper")} | {fact: _fact(part, fact) for fact in facts}
        for _, part in sorted(parts()[kind].items())
    ]


def _fact(part: dict[str, Any], fact: str) -> Any:
    """A fact of a part's registration or class: "insertion" names the places of a memory, "can" is a phrase."""
    stated = part["stated"]
    if fact == "insertion":
        return ", ".join(name for word, name in PLACES.items() if word in stated.get("needs", ())) or "none"
    value = part["info"].get(fact, stated.get(fact))
    return in_words(value) if fact == "can" and isinstance(value, list) else value
