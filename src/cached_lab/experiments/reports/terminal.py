"""Tables for people: no wider than a terminal, and in a pipe or a file as wide as they are, so that nothing is cut."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from .board_page import board_tables
from .cache_use_table import cache_use_table, legend
from .detection_table import COLUMNS
from .far_page import COLUMNS as COLUMNS_FAR
from .far_page import far_cells, far_rows, far_sentences, trained_segments
from .formatting import MISSING, P_VALUES, Metric, difference_words, pair_name, unknown_words
from .memory_use_table import place_table, reset_sentence, use_sentence
from .probe_page import accuracy_text, table_columns, table_rows

UNBOUNDED = 10_000
"""Characters of a line where there is no terminal."""


def open_console() -> Console:
    """Standard output; without a terminal its lines are as long as what stands in them."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=UNBOUNDED)


def print_statistics(
    statistics: Sequence[dict[str, Any]],
    metric_name: str,
    split: str,
    reference: str,
    console: Console,
    protocols: Mapping[str, str] | None = None,
    *,
    pairs: Sequence[dict[str, Any]] = (),
    rows_intervals: Mapping[str, tuple[float, float]] | None = None,
    baselines: Mapping[str, float] | None = None,
) -> None:
    """Print mean, interval, difference to the reference and p-value of each variant, and the guessers below them.

    Args:
        statistics: rows of `statistics.summarise`.
        protocols: how each variant was scored, where that is worth lines of its own below the table.
        pairs: rows of `statistics.summarise_pairs`, for a table of their own.
        rows_intervals: by variant, the interval that the number of scored rows leaves.
        baselines: scores of guessers.
    """
    metric = Metric(metric_name)
    differing = any(row["difference"] is not None for row in statistics)
    title = f"{split} {metric.axis_label.replace('[', '(').replace(']', ')')}"
    title += "" if pairs else f", reference {reference}"
    columns = ["seeds", "mean", "95 % interval"] + (["interval by rows"] if rows_intervals else [])
    tested = ["difference", "95 % interval", P_VALUES[0] if len(statistics) > 2 else "p"]
    table = _table(title, "variant", columns + (tested if differing else []))
    for row in statistics:
        cells = [row["name"], str(row["seeds"]), metric.value(row["mean"], unit=False)]
        cells.append(metric.interval(row["low"], row["high"]))
        cells += [metric.interval(*rows_intervals[row["name"]])] if rows_intervals else []
        table.add_row(*cells, *(difference_words(row, metric, unit=False)[:3] if row["difference"] is not None else []))
    for name, value in (baselines or {}).items():
        table.add_row(f"baseline: {name}", "", metric.value(value, unit=False))
    console.print(table)
    if pairs:
        table = _table("paired differences", "pair", ["seeds", "difference", "95 % interval", *P_VALUES])
        for row in pairs:
            table.add_row(pair_name(row), str(row["seeds"]), *difference_words(row, metric, unit=False))
        console.print(table)
    if protocols:  # too long for a column of a narrow terminal
        console.print(" [bold]protocol[/bold]")
        longest = max((len(row["name"]) for row in statistics), default=0)
        for row in statistics:
            line = f" {row['name']:<{longest}}  {protocols.get(row['name'], '')}"
            console.print(line, markup=False, soft_wrap=True)


def print_cache_use(
    rows: Sequence[tuple[str, Sequence[dict[str, Any]]]], metric: Metric, split: str, console: Console
) -> None:
    """Print what treating the caches in other ways changes, and what the columns mean."""
    header, lines = cache_use_table(rows, metric)
    table = _table(f"use of the cache: {split} {metric.name}, and what changes it", header[0], header[1:])
    for line in lines:
        table.add_row(*line)
    console.print(table)
    console.print(legend(header[1:]), markup=False, soft_wrap=True)


def print_sizes(sizes: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """Print what was made equal, parameters or operations, and the width that makes it so."""
    operations = any("training_flops" in facts for facts in sizes.values())
    title = "operations of a forward pass in training, per row" if operations else "equal size"
    columns = ["operations" if operations else "parameters", "feed_forward"] + (["equal to"] if operations else [])
    table = _table(title, "variant", columns)
    for name, facts in sizes.items():
        count = facts["training_flops" if operations else "matched_parameters"]
        cells = [name, f"{count:,}", str(facts["feed_forward"])]
        if "matched" in facts:
            cells.append(f"{facts['matched']} (ratio {facts['flops_ratio']:.4f})")
        table.add_row(*cells)
    console.print(table)


def print_scores(title: str, rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print the scores of a run, a row (or one for boxes and one for masks) per way of treating its memory."""
    console.print(_precision_table(title, rows) if "box_ap" in rows[0] else _score_table(title, rows))
    for name, value in rows[0].items():
        if name.endswith("_signature"):
            console.print(f" {name.removesuffix('_signature')}: {value}", markup=False, soft_wrap=True)


def print_text_use(rows: Sequence[dict[str, Any]], about: Mapping[str, Any], console: Console) -> None:
    """Print what an evaluation of a text says beside its scores: unknown words, losses by place, use of the memory.

    Args:
        rows: of `text_row`. about: of `about_text`.
    """
    lines = []
    if "unknown" in about:
        lines.append(unknown_words(about["unknown"]))
    if "use" in about:
        header, cells = place_table(rows)
        table = _table("loss (nats) by place", header[0], header[1:])
        for row in cells:
            table.add_row(*row)
        console.print(table)
        lines += [reset_sentence(about["reset"])] if "reset" in about else []
        asked = about["use"] is not None
        lines.append(use_sentence(about["use"]) if asked else "whether the memory is used: --memory carry,shuffle")
    for line in lines:
        console.print(f" {line}", markup=False, soft_wrap=True)


def print_output_cache(result: Mapping[str, Any], console: Console) -> None:
    """Print the scores without and with a cache over outputs, as `evaluate_output_cache` gives them."""
    title = f"{result['run']}: {result['split']} split, step {result['step']}"
    console.print(_score_table(title, result["scores"], "output_cache"))
    about = result["output_cache"]
    settings = " ".join(f"{about['name']}.{option}={value}" for option, value in about["options"].items())
    lines = [settings + (f"; a datastore of {about['entries']:,} entries" if "entries" in about else "")]
    if about["tuned"]:
        losses = about["validation"]
        found = f"loss {losses['without']:.4f} without and {losses['with']:.4f} with"
        lines.append(f"tuned on the validation split: {', '.join(about['tuned'])} ({found})")
        lines += [f"{option} is at the end of what was tried: set others by hand" for option in about["at_end"]]
    lines.append(", ".join(f"{what} {seconds:.1f} s" for what, seconds in about["seconds"].items()))
    for line in lines:
        console.print(f" {line}", markup=False, soft_wrap=True)


def _score_table(title: str, rows: Sequence[dict[str, Any]], names: str = "memory") -> Table:
    numbers = [name for name, value in rows[0].items() if isinstance(value, int | float)]
    columns = [name for name in numbers if name != names]
    headings = ["loss (nats)" if name == "loss" else name.replace("_", " ") for name in columns]
    table = _table(title, names.replace("_", " "), headings)
    for row in rows:
        table.add_row(row[names], *(_shown(row, column) for column in columns))
    return table


def _precision_table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    table = _table(title, "memory", ["kind", *COLUMNS.values()])
    table.columns[1].justify = "left"
    for row in rows:
        for kind in ("box", "mask"):
            if f"{kind}_ap" in row:
                table.add_row(row["memory"], kind, *(_shown(row, f"{kind}_{part}") for part in COLUMNS))
    return table


def _shown(row: dict[str, Any], column: str) -> str:
    """One score as text: shares in per cent, an accuracy with the interval that its rows leave."""
    value = row[column]
    if isinstance(value, int):
        return f"{value:,}"
    if math.isnan(value):
        return MISSING
    if not Metric(column).percent:
        return f"{value:.4f}"
    low, high = row.get(f"{column}_interval") or (None, None)
    return f"{value:.2%} {Metric(column).interval(low, high)}".rstrip()


def print_probe(result: dict[str, Any], console: Console) -> None:
    """Print the shares of right answers that `probe.json` holds, and its notes."""
    title = f"right answers in per cent, {result['distance']} segments after the cue"
    table = _table(title, "memory", [column.replace(", ", "\n") for column in table_columns(result)])
    for row in table_rows(result):
        table.add_row(row.name, *map(accuracy_text, row.trainings))
    console.print(table)
    for name, note in result["notes"].items():
        console.print(f"{name}: {note}", markup=False)


def print_far(result: dict[str, Any], console: Console) -> None:
    """Print how far each memory holds, as `far.json` has it."""
    trained = f"trained with {trained_segments(result)} from cue to question"
    title = f"{trained}, asked up to {result['far']:,} tokens"
    table = _table(title, "task", ["memory", *COLUMNS_FAR])
    for row in far_rows(result):
        table.add_row(row.task, row.name, *far_cells(row, result))
    console.print(table)
    for task in result["tasks"]:
        console.print(f"{task}: {' '.join(far_sentences(result, task))}", markup=False, soft_wrap=True)


def print_board(result: dict[str, Any], console: Console) -> None:
    """Print the tables of a leaderboard, as `leaderboard.json` has them."""
    for title, header, rows in board_tables(result):
        shown = _table(title, header[0], header[1:])
        for row in rows:
            shown.add_row(*row)
        console.print(shown)


def _table(title: str, names: str, columns: Sequence[str]) -> Table:
    """An empty table: names at the left and numbers at the right, all broken into lines rather than cut."""
    table = Table(title=title, title_justify="left", box=None, header_style="bold")
    table.add_column(names, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    return table
