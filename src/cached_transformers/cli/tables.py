"""The table of a comparison on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from cached_transformers.analysis.wording import Metric, short_p


def print_statistics(
    statistics: Sequence[dict[str, Any]],
    metric_name: str,
    split: str,
    reference: str,
    console: Console,
    protocols: Mapping[str, str] | None = None,
) -> None:
    """Print mean, interval, difference to the reference and p-value of each variant.

    Args:
        statistics: rows of `analysis.statistics.summarise`.
        protocols: how each variant was scored, where that is worth lines of its own below the table.
    """
    metric = Metric(metric_name)
    title = f"{split} {metric.axis_label.replace('[', '(').replace(']', ')')}, reference {reference}"
    table = Table(title=title, title_justify="left", box=None, header_style="bold")
    longest = max((len(row["name"]) for row in statistics), default=0)
    table.add_column("variant")
    for column in ("seeds", "mean", "95 % interval", "difference", "95 % interval", "p"):
        table.add_column(column, justify="right")
    for row in statistics:
        cells = [row["name"], str(row["seeds"]), metric.value(row["mean"], unit=False)]
        cells.append(metric.interval(row["low"], row["high"]))
        if row["difference"] is not None:
            mean, low, high = (row["difference"][key] for key in ("mean", "low", "high"))
            cells += [metric.difference(mean, unit=False), metric.interval(low, high, signed=True)]
            cells.append(short_p(row["p_value"]))
        table.add_row(*cells)
    console.print(table)
    if protocols:  # too long for a column of a narrow terminal
        console.print(" [bold]protocol[/bold]")
        for row in statistics:
            line = f" {row['name']:<{longest}}  {protocols.get(row['name'], '')}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
