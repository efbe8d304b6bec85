"""The chance in drawing the rows of a split, beside scores of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .statistics import wilson_interval


def with_intervals(values: Mapping[str, Any]) -> dict[str, Any]:
    """Scores of a split with Wilson's 95 % interval of each accuracy: the chance in drawing the rows, not in the seed.

    `values` holds the number of rows under "rows"; without it they are returned as they are.
    """
    found = dict(values)
    rows = int(values.get("rows") or 0)
    for name in [key for key in values if rows and (key == "accuracy" or key.endswith("_accuracy"))]:
        interval = wilson_interval(round(values[name] * rows), rows)
        found[f"{name}_interval"] = [interval.low, interval.high]
    return found
