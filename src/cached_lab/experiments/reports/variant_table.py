"""The table of a comparison's variants, described once: the page and the Markdown text each write it in their way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .formatting import MISSING, P_VALUES, Metric, difference_words, mean_of, short_count, short_seconds
from .page import Cell
from .run_folder import Comparison

COSTS: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "parameters": ("parameters", short_count),
    "operations": ("flops", short_count),
    "operations in training": ("training_flops", short_count),
    "time per step": ("seconds_per_step", short_seconds),
}
"""Columns of what variants cost: their key in compare.json, and how it is written."""
BY_ROWS = "interval by rows"


def variant_columns(comparison: Comparison, metric: Metric, missing: str = MISSING) -> dict[str, list[Cell]]:
    """A cell for each variant, by the head of the column; the small print of a cost is its ratio to the reference's.

    Args:
        missing: what stands where the reference has no difference, and a variant no protocol.
    """
    variants, statistics = comparison.variants, comparison.statistics
    base = next(v for v in variants if v["name"] == comparison.reference)

    def any_has(key: str) -> bool:
        return any(variant.get(key) for variant in variants)

    columns = {
        "variant": [Cell(row["name"]) for row in statistics],
        f"{comparison.split} {metric.name}": [
            Cell(metric.value(row["mean"]), metric.interval(row["low"], row["high"])) for row in statistics
        ],
    }
    if any_has("rows_interval"):
        columns[BY_ROWS] = [Cell(metric.interval(*variant["rows_interval"])) for variant in variants]
    if any_has("last_values"):
        columns["last step"] = [Cell(metric.value(mean_of(variant.get("last_values")))) for variant in variants]
    if not comparison.pairs:
        heads = [f"difference to {comparison.reference}", *(P_VALUES if len(variants) > 2 else ["p"])]
        found = [difference_cells(row, metric) if row["difference"] else [Cell(missing)] * 3 for row in statistics]
        columns |= {head: list(cells) for head, cells in zip(heads, zip(*found, strict=True), strict=False)}
    for head, (key, write) in COSTS.items():
        if head != "operations in training" or any_has(key):
            columns[head] = [Cell(write(v.get(key)), _relative(v.get(key), base.get(key))) for v in variants]
    if any_has("protocol"):
        columns["protocol"] = [Cell(str(variant.get("protocol", missing))) for variant in variants]
    return columns


def difference_cells(row: Mapping[str, Any], metric: Metric) -> list[Cell]:
    """The difference with its interval, p, and p after Holm."""
    words = difference_words(row, metric)
    return [Cell(words.mean, words.interval), Cell(words.p), Cell(words.holm)]


def baseline_rows(comparison: Comparison, metric: Metric, fillers: Sequence[str]) -> list[list[str]]:
    """A row for each guesser, whose other columns hold `fillers`."""
    return [[f"baseline: {name}", metric.value(x), *fillers] for name, x in comparison.baselines.items()]


def _relative(value: float | None, base: float | None) -> str:
    return f"{value / base:.3g} \N{MULTIPLICATION SIGN}" if value and base else ""
