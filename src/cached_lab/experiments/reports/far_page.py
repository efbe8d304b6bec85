"""The page of `cached probe --train-distance`: what memories still know so much later, as a picture and in words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

from .figures.style import MUTED, blank_figure, inline_svg, looks, style
from .formatting import environment_text
from .page import Block, Cell, Facts, Header, Heading, Picture, Section, Table, Text, write_page
from .probe_page import select

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

TITLE = "How far memories hold"
MENTIONED = 4
"""Memories that a sentence names; the table has them all."""
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


def trained_segments(content: Mapping[str, Any]) -> str:
    """The distances of the training: "0 to 3", and "0 or 1 to 3" where tasks begin at different ones."""
    nearest = sorted({result["settings"]["course"]["nearest"] for result in content["results"]})
    return f"{' or '.join(map(str, nearest))} to {content['course']['farthest']} segments"


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
    carries = row.name in content["memories"]  # without a memory nothing is carried, and most of a text is not read
    return [
        f"{min(t['solved'] for t in row.trainings)}",
        f"{min(held):,}",
        f"{sum(far >= asked * segment for far in held)} of {len(held)}",
        f"{100 * mean(last):.1f} at {asked * segment:,}" if asked else "",
        f"{row.trainings[0]['state_bytes']:,}" if carries else "",
        f"{sum(tokens) / seconds:,.0f}" if carries and seconds else "",
    ]


def far_sentences(content: Mapping[str, Any], task: str) -> list[str]:
    """What the picture of a task shows: memories at the longest text that one of them was asked about, and the same
    model without a memory there."""
    rows = {row.name: row for row in far_rows(content) if row.task == task}
    none, segment, seeds = rows["no memory"], content["segments"][task], content["seeds"]
    memories = {name: row for name, row in rows.items() if name in content["memories"]}
    farthest = max(int(distance) for row in memories.values() for t in row.trainings for distance in t["far"])
    there = {name: shares for name, row in memories.items() if (shares := _shares(row, farthest))}
    best = sorted(there, key=lambda name: -mean(there[name]))
    shown = [f"{name} in {_percent(there[name])}" for name in best[1:MENTIONED]]
    means = "" if seeds == 1 else f"mean of {seeds} seeds; the worst: {_percent([min(there[best[0]])])}"
    found, chance = _shares(none, farthest), _percent([none.trainings[0]["chance"]])
    first = f"{best[0]} is right in {_percent(there[best[0]])}{f' ({means})' if means else ''}"
    trained = f"in training cue and question stood at most {content['course']['farthest'] * segment:,} tokens apart"
    without = f"is right in {_percent(found)}" if found else "was not asked there"
    return [
        f"Asked {farthest * segment:,} tokens after the cue, {', '.join([first, *shown])}; {trained}.",
        f"The same model without a memory {without}; a guess is right in {chance}.",
    ]


def _shares(row: FarRow, distance: int) -> list[float]:
    """Right answers at a distance, one a seed; one that was as good as a guess before counts as a guess, and where all
    were, or nobody asked, there are none."""
    asked = [t["far"].get(str(distance)) for t in row.trainings]
    guess = row.trainings[0]["chance"]
    return [answer[0] if answer else guess for answer in asked] if any(asked) else []


def _percent(shares: Sequence[float]) -> str:
    return f"{100 * mean(shares):.1f} %"


def _curves(ax: Axes, rows: Sequence[FarRow], segment: int) -> None:
    chosen = looks([row.name for row in rows], "no memory")
    for row in rows:
        seeds = [{int(d) * segment: 100 * share for d, (share, *_) in t["far"].items()} for t in row.trainings]
        tokens = sorted(set.intersection(*map(set, seeds)))
        if not tokens:
            continue
        look, values = chosen[row.name], [[seed[n] for seed in seeds] for n in tokens]
        # What all memories are held against lies under them, and wide enough to be seen where they are as good.
        line: dict[str, Any] = {"lw": 6, "alpha": 0.35} if row.name == "whole text" else {"marker": look.marker}
        ax.plot(tokens, list(map(mean, values)), color=look.colour, ls=look.dash, ms=3.5, label=row.name, **line)
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
        trained = content["course"]["farthest"] * segment
        ax.axvline(trained, color=MUTED, ls=":", lw=1)
        ax.axhline(100 * chance, color=MUTED, ls="--", lw=0.8)
        _curves(ax, rows, segment)
        ax.set_xscale("log")
        small: dict[str, Any] = {"color": MUTED, "fontsize": 9, "textcoords": "offset points", "annotation_clip": False}
        across, along = ("axes fraction", "data"), ("data", "axes fraction")
        ax.annotate("a guess", (1, 100 * chance), (4, 0), xycoords=across, va="center", **small)
        ax.annotate("farthest in training", (trained, 0.5), (-12, 0), xycoords=along, rotation=90, va="center", **small)
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
    """The part of a page that tells of one far.json: first the picture of every task, then how it came about."""
    content = json.loads(path.read_text(encoding="utf-8"))
    rows = far_rows(content)
    blocks: list[Block] = [Header(level, TITLE)]
    for index, task in enumerate(content["tasks"]):
        blocks += [Heading(level + 1, task)] if len(content["tasks"]) > 1 else []
        blocks.append(Text(" ".join(far_sentences(content, task)), "summary"))
        what = "right answers against tokens since the cue"
        drawn = inline_svg(far_figure(content, task), f"{identifier}{index}0", f"{what}, {task}")
        band = "" if content["seeds"] == 1 else f" Mean of {content['seeds']} seeds, and all between worst and best."
        asked = f" {content['asked'][task]}" if "asked" in content else ""  # older files do not say
        blocks.append(Picture(drawn, f"{task}: {what}.{band}{asked}"))
    blocks += [
        Table(
            ["task", "memory", *COLUMNS],
            [[Cell(row.task), Cell(row.name), *map(Cell, far_cells(row, content))] for row in rows],
            f"Seeds: {content['seeds']}; {content['rows']} texts each. Asking ends where a memory is near a guess.",
        ),
        Text(
            f"Trained with cue and question {trained_segments(content)} apart, and asked in "
            f"texts of any length that are read as streams. A distance is held where {100 * ENOUGH:.0f} % of the "
            f"answers are right; numbers are the least over seeds. A short convolution of {content['taps']} tokens "
            "stands in front of attention, the same for all. Whole text: attention over everything, without a memory, "
            "of one seed and in texts as long as those of the training.",
            "note",
        ),
    ]
    if len(content["memories"]) > 1:
        for index, task in enumerate(content["tasks"]):
            what = "tokens held against bytes of state"
            drawn = inline_svg(bytes_figure(content, task), f"{identifier}{index}1", f"{what}, {task}")
            blocks.append(Picture(drawn, f"{task}: {what}; the least over seeds."))
    about = {"command": content["command"], "date": content["date"]}
    return Section([*blocks, Facts(about | {"environment": environment_text(content["environment"])})])
