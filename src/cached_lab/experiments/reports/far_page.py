"""The tables and the page of `cached probe --train-distance`: answers long after the cue."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

from .blocks import Block, FactList, Heading, Paragraph, Picture, ReportTable
from .figures.curves import answers_by_distance
from .figures.style import blank_figure, inline_svg, looks, style
from .formatting import environment_text
from .page import write_page
from .probe_page import select
from .terminal import show

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

TITLE = "How far memories hold"
MENTIONED = 4
"""Memories that a sentence names; the table has all."""
ENOUGH = 0.99
"""Share of right answers at which a distance counts as held."""
COLUMNS = (
    "trained to, segments",
    "held, tokens",
    "seeds that hold all of it",
    "right there",
    "state, bytes",
    "tokens/s",
)


class FarRow(NamedTuple):
    """A memory on a task: its trainings, one per seed."""

    task: str
    name: str
    trainings: list[Mapping[str, Any]]


def print_far(content: Mapping[str, Any], console: Console) -> None:
    """Print the distances that each memory holds, as in `far.json`."""
    trained = f"trained with {trained_segments(content)} from cue to question"
    show(console, _table(content, title=f"{trained}, asked up to {content['far']:,} tokens"))
    for task in content["tasks"]:
        show(console, Paragraph(f"{task}: {' '.join(_sentences(content, task))}"))


def trained_segments(content: Mapping[str, Any]) -> str:
    """The distances of the training: "0 to 3", or "0 or 1 to 3" if the nearest one depends on the task."""
    nearest = sorted({result["settings"]["course"]["nearest"] for result in content["results"]})
    return f"{' or '.join(map(str, nearest))} to {content['course']['farthest']} segments"


def held_tokens(training: Mapping[str, Any], segment: int) -> int:
    """Tokens from cue to question up to which all tested distances are held."""
    far = 0
    for distance, (share, *_) in sorted((int(d), answer) for d, answer in training["far"].items()):
        if share < ENOUGH:
            break
        far = distance * segment
    return far


def write_far_report(folder: Path) -> Path:
    """Write `report.html` beside far.json."""
    return write_page(folder, TITLE, far_section(folder / "far.json", 1, "f"))


def far_section(path: Path, level: int, identifier: str) -> list[Block]:
    """The part of a page on one far.json: the picture of every task, then the table and its circumstances."""
    content = json.loads(path.read_text(encoding="utf-8"))
    seeds = content["seeds"]
    blocks: list[Block] = [Heading(level, TITLE)]
    for index, task in enumerate(content["tasks"]):
        blocks += [Heading(level + 1, task)] if len(content["tasks"]) > 1 else []
        blocks.append(Paragraph(" ".join(_sentences(content, task)), "summary"))
        title = "right answers against tokens since the cue"
        drawn = inline_svg(_answers_figure(content, task), f"{identifier}{index}0", f"{title}, {task}")
        band = "" if seeds == 1 else f" Mean of {seeds} seeds; the band runs from the worst to the best."
        asked = f" {content['asked'][task]}" if "asked" in content else ""  # missing in older files
        blocks.append(Picture(drawn, f"{task}: {title}.{band}{asked}"))
    notes = f"Seeds: {seeds}; {content['rows']} texts each. Tests end where a memory is near a guess."
    circumstances = (
        f"Trained with cue and question {trained_segments(content)} apart, and tested in texts of any length that are "
        f"read as streams. A distance is held if {100 * ENOUGH:.0f} % of the answers are right; numbers are the least "
        f"over seeds. All models mix {content['taps']} tokens by a short convolution before attention. Whole text: "
        "attention over everything, without a memory, of one seed and in texts as long as those of the training."
    )
    blocks += [_table(content, notes), Paragraph(circumstances, "note")]
    for index, task in enumerate(content["tasks"] if len(content["memories"]) > 1 else ()):
        title = "tokens held against bytes of state"
        drawn = inline_svg(_bytes_figure(content, task), f"{identifier}{index}1", f"{title}, {task}")
        blocks.append(Picture(drawn, f"{task}: {title}; the least over seeds."))
    about = {"command": content["command"], "date": content["date"]}
    return [*blocks, FactList(about | {"environment": environment_text(content["environment"])})]


def _rows(content: Mapping[str, Any], task: str) -> list[FarRow]:
    """A row for no memory, for attention over the whole text, and for every memory."""
    arms = [("none", "no memory"), ("none", "whole text"), *((m, "far") for m in content["memories"])]
    found = [
        FarRow(task, arm if memory == "none" else memory, select(content["results"], task, memory, arm))
        for memory, arm in arms
    ]
    return [row for row in found if row.trainings]


def _table(content: Mapping[str, Any], notes: str = "", title: str = "") -> ReportTable:
    rows = [[row.task, row.name, *_cells(row, content)] for task in content["tasks"] for row in _rows(content, task)]
    return ReportTable(["task", "memory", *COLUMNS], rows, notes, title)


def _cells(row: FarRow, content: Mapping[str, Any]) -> list[str]:
    """The cells of a row: the least over seeds, and the mean of the answers; a training that had ended is a guess."""
    segment = content["segments"][row.task]
    held = [held_tokens(training, segment) for training in row.trainings]
    asked = max(max(map(int, training["far"]), default=0) for training in row.trainings)
    tokens = [sum(int(d) * rows for d, (*_, rows) in t["far"].items()) * segment for t in row.trainings]
    seconds = sum(t["seconds_far"] for t in row.trainings)
    has_memory = row.name in content["memories"]  # without one there is no state, and most of a text is not read
    return [
        f"{min(t['solved'] for t in row.trainings)}",
        f"{min(held):,}",
        f"{sum(far >= asked * segment for far in held)} of {len(held)}",
        f"{100 * mean(_shares(row, asked)):.1f} at {asked * segment:,}" if asked else "",
        f"{row.trainings[0]['state_bytes']:,}" if has_memory else "",
        f"{sum(tokens) / seconds:,.0f}" if has_memory and seconds else "",
    ]


def _sentences(content: Mapping[str, Any], task: str) -> list[str]:
    """Answers of the best memories at the longest tested distance, and of the model without a memory there."""
    rows = {row.name: row for row in _rows(content, task)}
    none, segment, seeds = rows["no memory"], content["segments"][task], content["seeds"]
    memories = {name: row for name, row in rows.items() if name in content["memories"]}
    farthest = max(int(distance) for row in memories.values() for t in row.trainings for distance in t["far"])
    there = {name: shares for name, row in memories.items() if (shares := _shares(row, farthest))}
    best = sorted(there, key=lambda name: -mean(there[name]))
    shown = [f"{name} in {_percent(there[name])}" for name in best[1:MENTIONED]]
    means = "" if seeds == 1 else f" (mean of {seeds} seeds; the worst: {_percent([min(there[best[0]])])})"
    found, chance = _shares(none, farthest), _percent([none.trainings[0]["chance"]])
    first = f"{best[0]} is right in {_percent(there[best[0]])}{means}"
    trained = f"in training cue and question were at most {content['course']['farthest'] * segment:,} tokens apart"
    without = f"is right in {_percent(found)}" if found else "was not asked there"
    return [
        f"Asked {farthest * segment:,} tokens after the cue, {', '.join([first, *shown])}; {trained}.",
        f"The same model without a memory {without}; a guess is right in {chance}.",
    ]


def _shares(row: FarRow, distance: int) -> list[float]:
    """Right answers at a distance, one per seed; a training that had ended counts as a guess. Empty if all had."""
    asked = [t["far"].get(str(distance)) for t in row.trainings]
    return [a[0] if a else row.trainings[0]["chance"] for a in asked] if any(asked) else []


def _percent(shares: Sequence[float]) -> str:
    return f"{100 * mean(shares):.1f} %"


def _answers_figure(content: Mapping[str, Any], task: str) -> Figure:
    rows, segment = _rows(content, task), content["segments"][task]
    lines = {}
    for row in rows:
        common = set.intersection(*(set(t["far"]) for t in row.trainings))
        lines[row.name] = {int(d) * segment: [t["far"][d][0] for t in row.trainings] for d in common}
    trained = content["course"]["farthest"] * segment
    return answers_by_distance(lines, rows[0].trainings[0]["chance"], trained, "tokens since the cue", log=True)


def _bytes_figure(content: Mapping[str, Any], task: str) -> Figure:
    """Tokens that a memory holds, the least over seeds, against the bytes of its state."""
    rows, segment = _rows(content, task), content["segments"][task]
    chosen = looks([row.name for row in rows], "no memory")
    figure, axes = blank_figure(8.0, 3.4, 1, 1)
    ax = axes[0][0]
    with style():
        for row in rows:
            if row.name in content["memories"]:
                held = max(min(held_tokens(t, segment) for t in row.trainings), segment / 2)
                look, size = chosen[row.name], row.trainings[0]["state_bytes"]
                ax.plot(size, held, color=look.colour, marker=look.marker, ls="", label=row.name)
        ax.set(xscale="log", yscale="log", xlabel="bytes of state of a row", ylabel="tokens held, least over seeds")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter("{x:,.0f}")
            axis.set_minor_formatter("")
        figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return figure
