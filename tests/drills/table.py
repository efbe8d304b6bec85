"""The table of the drills, in a page between two marks, with the machine and the versions it was made on."""

from __future__ import annotations

from pathlib import Path

from cached_transformers.experiments.environment import environment

from .frame import Outcome

MARKS = ("<!-- drills: made by `make drills` -->", "<!-- drills end -->")


def write_table(page: Path, outcomes: list[Outcome], seed: int) -> None:
    """Write the table of these outcomes into a page."""
    write_between(page, MARKS, table(outcomes, seed))


def write_between(page: Path, marks: tuple[str, str], content: str) -> None:
    """Write the part of a page between two lines again.

    Raises:
        ValueError: the page has no such lines.
    """
    before, begin, rest = page.read_text(encoding="utf-8").partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise ValueError(f"{page} has no part between {marks[0]!r} and {marks[1]!r}; put both lines where it goes")
    page.write_text(f"{before}{begin}\n{content}\n{end}{after}", encoding="utf-8")


def table(outcomes: list[Outcome], seed: int) -> str:
    """One row a drill: what is done, cases tried, held and failed, seconds."""
    lines = [
        "| Drill | What is done, and what must hold | Tried | Held | Failed | Seconds |",
        "|---|---|---|---|---|---|",
    ]
    for drill, results, seconds in outcomes:
        failed = sum(result.problem is not None for result in results)
        numbers = f"{len(results):,} | {len(results) - failed:,} | {failed:,} | {seconds:.0f}"
        lines.append(f"| `{drill.name}` | {drill.summary} | {numbers} |")
    facts = environment("cpu")
    where = f"{facts['device']}, python {facts['python']}, torch {facts['torch']}"
    return "\n".join([*lines, "", f"`make drills`, seed {seed}: {where}, {facts['date']}, commit {facts['commit']}."])
