"""All drills of this folder: every module that has a `SUMMARY`; and their table in a page, between two marks."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from cached_lab.experiments.environment import environment
from cached_lab.experiments.reports.markdown import write_between

from .frame import Drill, Outcome, numbered


def drills() -> list[Drill]:
    """Drills in order of their names, each from the names of its module."""
    found: list[Drill] = []
    for file in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if not file.name.startswith(("_", "test_")):
            own = vars(importlib.import_module(f"{__package__}.{file.name}"))
            if "SUMMARY" in own:
                what = own["SUMMARY"], own.get("cases", numbered), own["attempt"], own["COUNT"], own["SAMPLE"]
                found.append(Drill(file.name, *what, own.get("prepare"), own.get("LIMIT", 60.0)))
    return sorted(found, key=lambda drill: drill.name)


MARKS = ("<!-- drills: made by `make drills` -->", "<!-- drills end -->")


def write_table(page: Path, outcomes: list[Outcome], seed: int) -> None:
    """Write the table of these outcomes into a page."""
    write_between(page, MARKS, table(outcomes, seed))


def table(outcomes: list[Outcome], seed: int) -> str:
    """Return one row per drill: action, cases run, passed and failed, seconds."""
    lines = ["| Drill | Action | Tried | Held | Failed | Seconds |", "|---|---|---|---|---|---|"]
    for drill, results, seconds in outcomes:
        failed = sum(result.problem is not None for result in results)
        numbers = f"{len(results):,} | {len(results) - failed:,} | {failed:,} | {seconds:.0f}"
        lines.append(f"| `{drill.name}` | {drill.summary.partition(': ')[0]} | {numbers} |")
    facts = environment("cpu")
    where = f"{facts['device']}, python {facts['python']}, torch {facts['torch']}"
    return "\n".join([*lines, "", f"`make drills`, seed {seed}: {where}, {facts['date']}, commit {facts['commit']}."])
