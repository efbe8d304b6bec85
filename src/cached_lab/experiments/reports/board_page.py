"""The tables of `cached leaderboard`, for the terminal and for a Markdown page."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cached_lab.experiments.efficiency import NOTE
from cached_transformers.files import write_whole

from .blocks import FactList, ReportTable
from .formatting import MISSING, counted, share_text, short_count
from .markdown import around, to_markdown, write_between
from .probe_page import trained_segments, windows_note

MARKS = ("<!-- leaderboard: made by `cached leaderboard` -->", "<!-- leaderboard end -->")
"""The command replaces the text between them."""
COLUMNS = ["memory", "near, mean", "efficiency, near", "far, mean", "solved", "state, bytes", "parameters"]
COLUMNS += ["FLOPs a token", "reading, no memory = 1", "training, no memory = 1"]


def board_tables(content: Mapping[str, Any]) -> list[ReportTable]:
    """The standings with costs, and right answers by task, near and far."""
    standings, tasks = content["standings"], content["tasks"]
    asks = {task: group for group, members in content["groups"].items() for task in members}
    overall = [
        [
            row["name"],
            _percent(row["near_mean"]),
            share_text(row.get("efficiency")),
            _percent(row["far_mean"]),
            f"{row['solved']} of {row['trainings']}",
            MISSING if row["state_bytes"] is None else _range(row["state_bytes"]),
            _range(row["parameters"]),
            short_count((cost := content["costs"][row["name"]])["flops"]),
            *(f"{r['median']:.2f} ({r['low']:.2f}-{r['high']:.2f})" for r in (cost["reading"], cost["training"])),
        ]
        for row in standings
    ]
    tables = [ReportTable(COLUMNS, overall, f"{NOTE}{windows_note(content)}", "Standings")]
    places = {"near": "Near: right answers at the farthest trained distance, %"}
    places["far"] = "Far: right answers in the longest texts, %"
    for where, title in places.items():
        heads = [f"{asks[task]}: {task}, {standings[-1][where][task]['tokens']} tokens" for task in tasks]
        shares = partial(_share, intervals=content["seeds"] > 1)
        rows = [[row["name"], *(shares(row[where][task]) for task in tasks)] for row in standings if row[where]]
        tables.append(ReportTable(["memory", *heads], rows, title=title))
    return tables


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{100 * share:.1f}"


def _share(share: Mapping[str, Any], intervals: bool) -> str:
    """A share with its interval over seeds, and a mark if one of its trainings counts as a guess."""
    told = intervals and share["low"] is not None
    interval = f" [{_percent(share['low'])}-{_percent(share['high'])}]" if told else ""
    return f"{_percent(share['mean'])}{interval}{' ~' if share['ended'] else ''}"


def _range(values: list[int]) -> str:
    low, high = values
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"


def refuse_page(path: Path) -> None:
    """Refuse (ValueError) a page that cannot be written, before the training."""
    if path.is_dir():
        raise ValueError(f"--page {path} is a folder; give the name of a Markdown file")
    if path.is_file():
        around(path, MARKS)


def write_board_page(path: Path, content: Mapping[str, Any]) -> None:
    """Write the page; in an existing one, only the part between the marks."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "\n\n".join(["# Leaderboard", *MARKS]).encode() + b"\n")
    write_between(path, MARKS, board_markdown(content))


def board_markdown(content: Mapping[str, Any]) -> str:
    """The circumstances of the board, and its tables."""
    standings, *by_task = board_tables(content)
    command = FactList({"command": content["command"]})
    return "\n" + to_markdown([command, _circumstances(content), standings, *by_task])


def _circumstances(content: Mapping[str, Any]) -> str:
    facts, sizes = content["environment"], content["results"][0]["settings"]["sizes"]
    trained = ", ".join(sorted({_commit(result.get("environment")) for result in content["results"]}))
    rows, seeds = content["rows"], content["seeds"]
    brackets = f"In brackets: 95 %, the t interval over {seeds} seeds."
    if seeds == 1:
        most = 100 * 0.98 / rows**0.5
        brackets = f"95 % intervals of a share over the {rows} texts reach {most:.0f} points to a side."
    return (
        f"{content['machine']}; torch {facts['torch']}, python {facts['python']}, {content['date']}, commit "
        f"{_commit(facts)}; trainings of commit {trained}.\n\n"
        f'The board "{content["board"]}". Tasks: {", ".join(content["tasks"])}; '
        f"{counted(content['seeds'], 'seed')}, {sizes['steps']} steps at most, "
        f"cue and question {trained_segments(content)} apart in training, by a curriculum; "
        f"then texts of up to {content['far']:,} tokens. A language model of {sizes['depth']} layers with "
        f"{sizes['heads']} heads, width {sizes['width']}, with a short convolution of {content['taps']} tokens, the "
        f"same for all. {brackets} ~: a test that ended early, counted as a guess."
    )


def _commit(environment: Mapping[str, Any] | None) -> str:
    return ((environment or {}).get("commit") or "unknown")[:7]
