"""The page of `cached probe`: the table, and right answers against distance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

from .figures.style import MUTED, blank_figure, inline_svg, looks, style
from .formatting import environment_text
from .page import Block, Cell, Header, Heading, Picture, Section, Table, Text, write_page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Results = Sequence[Mapping[str, Any]]
TITLE = "What memories hold"
REACHES = ("within reach", "out of reach")


class ProbeRow(NamedTuple):
    """A memory's row of the table: the trainings behind each column."""

    name: str
    trainings: list[list[Mapping[str, Any]]]


def table_columns(content: Mapping[str, Any]) -> list[str]:
    """Heads of the columns behind the name: two a task."""
    return [f"{task}, {arm}" for task in content["tasks"] for arm in REACHES]


def table_rows(content: Mapping[str, Any]) -> list[ProbeRow]:
    """A row for no memory, which counts under "within reach", and one for each memory."""

    def row(memory: str, arms: Sequence[str]) -> list[list[Mapping[str, Any]]]:
        return [select(content["results"], task, memory, arm) for task in content["tasks"] for arm in arms]

    plain = ProbeRow("no memory", row("none", ("no memory", "")))
    return [plain, *(ProbeRow(memory, row(memory, REACHES)) for memory in content["memories"])]


def accuracy_text(trainings: Sequence[Mapping[str, Any]]) -> str:
    """Mean share of right answers over seeds in per cent; nothing where there is no training."""
    return f"{100 * mean(r['accuracy'] for r in trainings):.1f}" if trainings else ""


def select(results: Results, task: str, memory: str, arm: str) -> list[Mapping[str, Any]]:
    """The trainings of one task, memory and arm."""
    return [r for r in results if (r["task"], r["memory"], r["arm"]) == (task, memory, arm)]


def _cell(trainings: Sequence[Mapping[str, Any]]) -> Cell:
    if not trainings:
        return Cell("")
    small = f"{mean(r['steps'] for r in trainings):.0f} steps"
    exact = [r.get("exact", r["accuracy"]) for r in trainings]  # older files have none
    if exact != [r["accuracy"] for r in trainings]:
        small = f"whole episodes {100 * mean(exact):.1f}, {small}"
    return Cell(accuracy_text(trainings), small=small)


def distance_figure(content: Mapping[str, Any], task: str) -> Figure:
    """Right answers of every memory within reach, and of none, against the distance."""
    curves: dict[str, list[dict[int, float]]] = {}
    for memory, arm in [("none", "no memory"), *((m, "within reach") for m in content["memories"])]:
        seeds = [{int(d): a for d, a in r["distances"].items()} for r in select(content["results"], task, memory, arm)]
        if seeds:
            curves["no memory" if memory == "none" else memory] = seeds
    chance = next(r["chance"] for r in content["results"] if r["task"] == task)
    chosen = looks(curves, "no memory")
    figure, axes = blank_figure(8.0, 3.6, 1, 1)
    ax = axes[0][0]
    with style():
        ax.axvline(content["distance"], color=MUTED, ls=":", lw=1)
        ax.axhline(100 * chance, color=MUTED, ls="--", lw=0.8)
        ax.annotate(
            "chance", (1, 100 * chance), xycoords=("axes fraction", "data"), va="bottom", ha="right", color=MUTED
        )
        for name, seeds in curves.items():
            distances = sorted(seeds[0])
            values = [100 * mean(seed[d] for seed in seeds) for d in distances]
            look = chosen[name]
            ax.plot(distances, values, color=look.colour, ls=look.dash, marker=look.marker, ms=4, label=name)
        ax.set(xlabel="segments between cue and question", ylabel="right answers [%]", ylim=(0, 103))
        ax.set_xticks(distances)
        figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return figure


def write_probe_report(folder: Path) -> Path:
    """Write `report.html` beside probe.json."""
    return write_page(folder, TITLE, [probe_section(folder / "probe.json", 1, "p")])


def probe_section(path: Path, level: int, identifier: str) -> Section:
    """The part of a page that tells of one probe.json."""
    content = json.loads(path.read_text(encoding="utf-8"))
    seeds = max(r["seed"] for r in content["results"]) + 1
    about = {"command": content["command"], "date": content["date"], "seeds": seeds}
    blocks: list[Block] = [
        Header(level, TITLE, about | {"environment": environment_text(content["environment"])}),
        Text(
            f"Share of right answers in per cent, {content['distance']} segments after the cue, on episodes that were "
            "not trained on. Within reach: the options let the memory span the distance. Out of reach: they do not, "
            "by its theory; empty where it knows no bound. Without a memory nothing but guessing is possible.",
            "summary",
        ),
        Table(
            ["memory", *table_columns(content)],
            [[row.name, *map(_cell, row.trainings)] for row in table_rows(content)],
            f"Seeds: {seeds}. Training ends early when solved.",
        ),
        *(Text(f"{name}: {note}.", "note") for name, note in content["notes"].items()),
    ]
    for index, task in enumerate(content["tasks"]):
        description = f"right answers against distance, {task}"
        drawn = inline_svg(distance_figure(content, task), f"{identifier}{index}", description)
        caption = f"{task}: trained at a distance of {content['distance']} segments (dotted), tried at others."
        blocks += [Heading(level + 1, task), Picture(drawn, caption)]
    return Section(blocks)
