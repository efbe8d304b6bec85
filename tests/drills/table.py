"""The table of the drills, in a page between two marks, with the machine and the versions it was made on."""

from __future__ import annotations

from pathlib import Path

from cached_lab.experiments.environment import environment
from cached_lab.experiments.reports.markdown import write_between

from .frame import Outcome

MARKS = ("<!-- drills: made by `make drills` -->", "<!-- drills end -->")


def write_table(page: Path, outcomes: list[Outcome], seed: int) -> None:
    """Write the table of these outcomes into a page."""
    write_between(page, MARKS, table(outcomes, seed))


def table(outcomes: list[Outcome], seed: int) -> str:
    """Return one row per drill: action, cases run, passed and failed, seconds."""
    lines = [
        "| Drill | Action, and what must hold | Tried | Held | Failed | Seconds |",
        "|---|---|---|---|---|---|",
    ]
    for drill, results, seconds in outcomes:
        failed = sum(result.problem is not None for result in results)
        numbers = f"{len(results):,} | {len(results) - failed:,} | {failed:,} | {seconds:.0f}"
        lines.append(f"| `{drill.name}` | {drill.summary} | {numbers} |")
    facts = environment("cpu")
    where = f"{facts['device']}, python {facts['python']}, torch {facts['torch']}"
    return "\n".join([*lines, "", f"`make drills`, seed {seed}: {where}, {facts['date']}, commit {facts['commit']}."])
