"""The table that says what becomes of trained models when their caches are taken away, destroyed or made anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cached_lab.experiments.statistics import summarise

from .formatting import Metric, difference_words

DESCRIPTIONS = {
    "carry": "as training left it",
    "reset": "emptied",
    "shuffle": "its entries permuted",
    "other": "the cache of another seed's run",
}
Statistics = Sequence[dict[str, Any]]


def cache_use_statistics(by_mode: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Rows of `summarise` against `carry`: what each treatment of the cache changes, paired run by run."""
    return summarise({mode: values for mode, values in by_mode.items() if values}, "carry")


def cache_use_table(rows: Sequence[tuple[str, Statistics]], metric: Metric) -> tuple[list[str], list[list[str]]]:
    """Header and lines: a line for each variant, a column for each treatment, with its difference to `carry`.

    Args:
        rows: (variant, rows of `cache_use_statistics`).
    """
    modes = list(dict.fromkeys(row["name"] for _, statistics in rows for row in statistics))
    lines = []
    for name, statistics in rows:
        by_mode = {row["name"]: row for row in statistics}
        lines.append([name, *(_cell(by_mode.get(mode), metric) for mode in modes)])
    return ["variant", *modes], lines


def legend(modes: Sequence[str]) -> str:
    """What the columns mean, in a sentence."""
    words = [f"{mode}: {DESCRIPTIONS[mode]}" for mode in modes if mode in DESCRIPTIONS]
    if any(mode.startswith("batch ") for mode in modes):
        words.append("batch N: updated by each batch of N rows, as in training, and not stored")
    return f"The same trained weights with their cache treated in other ways. {'; '.join(words)}."


def _cell(row: Mapping[str, Any] | None, metric: Metric) -> str:
    if row is None:
        return ""
    if row["difference"] is None:
        return f"{metric.value(row['mean'])} {metric.interval(row['low'], row['high'])}".strip()
    words = difference_words(row, metric, unit=False)
    p = "" if row["p_value"] is None else f", p {words.p}"
    return f"{words.mean} {words.interval}{p}".strip()
