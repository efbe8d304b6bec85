"""The page of `cached probe --train-distance`: right answers against distance, and how far memories hold by bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

from .figures.style import MUTED, blank_figure, inline_svg, looks, style
from .page import Block, Cell, Header, Heading, Picture, Section, Table, Text, write_page
from .probe_page import select
from .wording import environment_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

TITLE = "How far memories hold"
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
    """A memory on a task: its trainings, one a seed."""

    task: str
    name: str
    trainings: list[Mapping[str, Any]]


def far_rows(content: Mapping[str, Any]) -> list[FarRow]:
    """A row for each task and each of: no memory, attention over the whole text, and every memory."""
    arms = [("none", "no memory"), ("none", "whole text"), *((m, "far") for m in content["memories"])]
    found = [
        FarRow(task, arm if name == "none" else name, select(content["results"], task, name, arm))
        for task in content["tasks"]
        for name, arm in arms
    ]
    return [row for row in found if row.trainings]


def held_tokens(training: Mapping[str, Any], segment: int) -> int:
    """Tokens from cue to question up to which every distance that was asked about is held."""
    far = 0
    for distance, (share, *_) in sorted((int(d), answer) for d, answer in training["far"].items()):
        if share < ENOUGH:
            break
        far = distance * segment
    return far


def far_cells(row: FarRow, content: Mapping[str, Any]) -> list[str]:
    """What the table says of a row; nothing where there is nothing to say. Numbers are the least over seeds, of answers
    the mean, in which one that was as good as a guess before counts as a guess."""
    segment = content["segments"][row.task]
    held = [held_tokens(training, segment) for training in row.trainings]
    asked = max(max(map(int, training["far"]), default=0) for training in row.trainings)
    last = [t["far"][str(asked)][0] if str(asked) in t["far"] else t["chance"] for t in row.trainings]
    tokens = [sum(int(d) * rows for d, (*_, rows) in t["far"].items()) * segment for t in row.trainings]
    seconds = sum(t["seconds_far"] for t in row.trainings)
    return [
        f"{min(t['solved'] for t in row.trainings)}",
        f"{min(held):,}",
        f"{sum(far >= asked * segment for far in held)} of {len(held)}",
        f"{100 * mean(last):.1f} at {asked * segment:,}" if asked else "",
        f"{row.trainings[0]['state_bytes']:,}",
        f"{sum(tokens) / seconds:,.0f}" if seconds else "",
    ]


def _curves(ax: Axes, rows: Sequence[FarRow], segment: int) -> None:
    chosen = looks([row.name for row in rows], "no memory")
    for row in rows:
        seeds = [{int(d) * segment: 100 * share for d, (share, *_) in t["far"].items()} for t in row.trainings]
        tokens = sorted(set.intersection(*map(set, seeds)))
        if not tokens:
            continue
        look, values = chosen[row.name], [[seed[n] for seed in seeds] for n in tokens]
        ax.plot(
            tokens, list(map(mean, values)), color=look.colour, ls=look.dash, marker=look.marker, ms=3.5, label=row.name
        )
        ax.fill_between(tokens, list(map(min, values)), list(map(max, values)), color=look.colour, alpha=0.15, lw=0)


def _in_plain_numbers(*axes: Axis) -> None:
    """Powers of ten as numbers, since no figure here draws formulas."""
    for axis in axes:
        axis.set_major_formatter("{x:,.0f}")
        axis.set_minor_formatter("")


def far_figure(content: Mapping[str, Any], task: str) -> Figure:
    """Right answers against tokens since the cue, on a logarithmic axis: means over seeds, and all between the worst
    and the best of them."""
    rows = [row for row in far_rows(content) if row.task == task]
    segment, chance = content["segments"][task], rows[0].trainings[0]["chance"]
    figure, axes = blank_figure(8.0, 3.8, 1, 1)
    ax = axes[0][0]
    with style():
        ax.axvline(content["course"]["farthest"] * segment, color=MUTED, ls=":", lw=1)
        ax.axhline(100 * chance, color=MUTED, ls="--", lw=0.8)
        _curves(ax, rows, segment)
        ax.set_xscale("log")
        _in_plain_numbers(ax.xaxis)
        ax.set(xlabel="tokens since the cue", ylabel="right answers [%]", ylim=(0, 103))
        figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return figure


def bytes_figure(content: Mapping[str, Any], task: str) -> Figure:
    """Tokens up to which a memory holds, the least over seeds, against the bytes of its state."""
    rows = [row for row in far_rows(content) if row.task == task and row.name not in ("no memory", "whole text")]
    every = [row.name for row in far_rows(content) if row.task == task]
    segment, chosen = content["segments"][task], looks(every, "no memory")
    figure, axes = blank_figure(8.0, 3.4, 1, 1)
    ax = axes[0][0]
    with style():
        for row in rows:
            held = max(min(held_tokens(t, segment) for t in row.trainings), segment / 2)
            look = chosen[row.name]
            ax.plot(row.trainings[0]["state_bytes"], held, color=look.colour, marker=look.marker, ls="", label=row.name)
        ax.set_xscale("log")
        ax.set_yscale("log")
        _in_plain_numbers(ax.xaxis, ax.yaxis)
        ax.set(xlabel="bytes of state of a row", ylabel="tokens held, least over seeds")
        figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return figure


def write_far_report(folder: Path) -> Path:
    """Write `report.html` beside far.json."""
    return write_page(folder, TITLE, [far_section(folder / "far.json", 1, "f")])


def far_section(path: Path, level: int, identifier: str) -> Section:
    """The part of a page that tells of one far.json."""
    content = json.loads(path.read_text(encoding="utf-8"))
    course = content["course"]
    about = {"command": content["command"], "date": content["date"], "seeds": content["seeds"]}
    blocks: list[Block] = [
        Header(level, TITLE, about | {"environment": environment_text(content["environment"])}),
        Text(
            f"Trained with cue and question {course['nearest']} to {course['farthest']} segments apart, and asked in "
            f"texts of any length that are read as streams. A distance is held where {100 * ENOUGH:.0f} % of the "
            f"answers are right; numbers are the least over seeds. A short convolution of {content['taps']} tokens "
            "stands in front of attention, the same for all. Whole text: attention over everything, without a memory.",
            "summary",
        ),
        Table(
            ["task", "memory", *COLUMNS],
            [[Cell(row.task), Cell(row.name), *map(Cell, far_cells(row, content))] for row in far_rows(content)],
            f"Seeds: {content['seeds']}; {content['rows']} texts each. Asking ends where a memory is near a guess.",
        ),
    ]
    for index, task in enumerate(content["tasks"]):
        pictures = [
            (far_figure(content, task), "right answers against distance", "dotted: the farthest that was trained"),
            (bytes_figure(content, task), "tokens held against bytes of state", "the least over seeds"),
        ]
        blocks.append(Heading(level + 1, task))
        for number, (figure, what, note) in enumerate(pictures):
            drawn = inline_svg(figure, f"{identifier}{index}{number}", f"{what}, {task}")
            blocks.append(Picture(drawn, f"{task}: {what}; {note}."))
    return Section(blocks)
