"""The table of a comparison on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from cached_transformers.experiments.reports.wording import Metric, pair_name, short_p


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
        statistics: rows of `experiments.statistics.summarise`.
        protocols: how each variant was scored, where that is worth lines of its own below the table.
        pairs: rows of `experiments.statistics.summarise_pairs`, for a table of their own.
        rows_intervals: by variant, the interval that the number of scored rows leaves.
        baselines: scores of guessers.
    """
    metric = Metric(metric_name)
    differing = any(row["difference"] is not None for row in statistics)
    title = f"{split} {metric.axis_label.replace('[', '(').replace(']', ')')}"
    title += "" if pairs else f", reference {reference}"
    table = Table(title=title, title_justify="left", box=None, header_style="bold")
    longest = max((len(row["name"]) for row in statistics), default=0)
    table.add_column("variant")
    columns = ["seeds", "mean", "95 % interval"] + (["interval by rows"] if rows_intervals else [])
    for column in columns + (["difference", "95 % interval", "p"] if differing else []):
        table.add_column(column, justify="right")
    for row in statistics:
        cells = [row["name"], str(row["seeds"]), metric.value(row["mean"], unit=False)]
        cells.append(metric.interval(row["low"], row["high"]))
        cells += [metric.interval(*rows_intervals[row["name"]])] if rows_intervals else []
        table.add_row(*cells, *(_difference(row, metric) if row["difference"] is not None else []))
    for name, value in (baselines or {}).items():
        table.add_row(f"baseline: {name}", "", metric.value(value, unit=False))
    console.print(table)
    if pairs:
        table = Table(title="paired differences", title_justify="left", box=None, header_style="bold")
        table.add_column("pair")
        for column in ("seeds", "difference", "95 % interval", "p", "p (Holm)"):
            table.add_column(column, justify="right")
        for row in pairs:
            table.add_row(pair_name(row), str(row["seeds"]), *_difference(row, metric), short_p(row["p_adjusted"]))
        console.print(table)
    if protocols:  # too long for a column of a narrow terminal
        console.print(" [bold]protocol[/bold]")
        for row in statistics:
            line = f" {row['name']:<{longest}}  {protocols.get(row['name'], '')}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _difference(row: Mapping[str, Any], metric: Metric) -> list[str]:
    mean, low, high = (row["difference"][key] for key in ("mean", "low", "high"))
    return [metric.difference(mean, unit=False), metric.interval(low, high, signed=True), short_p(row["p_value"])]
