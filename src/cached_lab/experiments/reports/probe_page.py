"""The tables and the page of `cached probe`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from .blocks import Block, FactList, Heading, Paragraph, Picture, ReportTable, TableCell, TableRow
from .figures.curves import answers_by_distance
from .figures.style import inline_svg
from .formatting import environment_text
from .page import write_page
from .terminal import show

if TYPE_CHECKING:
    from rich.console import Console

TITLE = "What memories hold"
REACHES = ("within reach", "out of reach")


def select(results: Sequence[Mapping[str, Any]], task: str, memory: str, arm: str) -> list[Mapping[str, Any]]:
    """The trainings of one task, memory and arm."""
    return [r for r in results if (r["task"], r["memory"], r["arm"]) == (task, memory, arm)]


def print_probe(content: Mapping[str, Any], console: Console) -> None:
    """Print the shares of right answers in `probe.json`, and its notes."""
    title = f"right answers in per cent, {content['distance']} segments after the cue"
    show(console, _table(content, title=title), *_notes(content))


def write_probe_report(folder: Path) -> Path:
    """Write `report.html` beside probe.json."""
    return write_page(folder, TITLE, probe_section(folder / "probe.json", 1, "p"))


def probe_section(path: Path, level: int, identifier: str) -> list[Block]:
    """The part of a page on one probe.json."""
    content = json.loads(path.read_text(encoding="utf-8"))
    seeds = max(r["seed"] for r in content["results"]) + 1
    about = {"command": content["command"], "date": content["date"], "seeds": seeds}
    blocks: list[Block] = [
        Heading(level, TITLE),
        FactList(about | {"environment": environment_text(content["environment"])}),
        Paragraph(
            f"Share of right answers in per cent, {content['distance']} segments after the cue, on new episodes. "
            "Within reach: the options let the memory span the distance. Out of reach: they do not, by its theory; "
            "empty if it knows no bound. Without a memory the model can only guess.",
            "summary",
        ),
        _table(content, f"Seeds: {seeds}. Training ends early when solved."),
        *_notes(content),
    ]
    for index, task in enumerate(content["tasks"]):
        figure = answers_by_distance(
            _curves(content, task),
            next(r["chance"] for r in content["results"] if r["task"] == task),
            content["distance"],
            "segments between cue and question",
        )
        drawn = inline_svg(figure, f"{identifier}{index}", f"right answers against distance, {task}")
        caption = f"{task}: trained at a distance of {content['distance']} segments (dotted), tested at others."
        blocks += [Heading(level + 1, task), Picture(drawn, caption)]
    return blocks


def _table(content: Mapping[str, Any], notes: str = "", title: str = "") -> ReportTable:
    """A row for no memory, counted as "within reach", and one per memory; two columns per task."""
    columns = [f"{task}, {arm}" for task in content["tasks"] for arm in REACHES]
    arms = {"none": ("no memory", "")} | {memory: REACHES for memory in content["memories"]}
    rows: list[TableRow] = []
    for memory, names in arms.items():
        found = [select(content["results"], task, memory, arm) for task in content["tasks"] for arm in names]
        rows.append(["no memory" if memory == "none" else memory, *map(_cell, found)])
    return ReportTable(["memory", *columns], rows, notes, title)


def _cell(trainings: Sequence[Mapping[str, Any]]) -> TableCell:
    if not trainings:
        return TableCell("")
    small = f"{mean(r['steps'] for r in trainings):.0f} steps"
    exact = [r.get("exact", r["accuracy"]) for r in trainings]  # missing in older files
    if exact != [r["accuracy"] for r in trainings]:
        small = f"whole episodes {100 * mean(exact):.1f}, {small}"
    return TableCell(f"{100 * mean(r['accuracy'] for r in trainings):.1f}", small)


def _notes(content: Mapping[str, Any]) -> list[Paragraph]:
    return [Paragraph(f"{name}: {note}.", "note") for name, note in content["notes"].items()]


def _curves(content: Mapping[str, Any], task: str) -> dict[str, dict[int, list[float]]]:
    """By memory and distance the shares of right answers of the seeds."""
    curves = {}
    for memory, arm in [("none", "no memory"), *((m, "within reach") for m in content["memories"])]:
        found = select(content["results"], task, memory, arm)
        if found:
            by_distance = {int(d): [r["distances"][d] for r in found] for d in found[0]["distances"]}
            curves["no memory" if memory == "none" else memory] = by_distance
    return curves
