"""Statistics for comparing training runs: 95 % intervals, paired tests over seeds, intervals over rows.

Seeds are few, so every interval comes with its number of values, and a test that cannot be made returns None with a
note. Two sources of chance are kept apart: *seeds* (t interval, paired t-test) and *rows of the evaluation set* (Wilson
interval). scipy lacks Holm's correction. Missing or non-finite values raise a ValueError.

References: E. B. Wilson, "Probable inference", JASA 22, 1927; S. Holm, Scandinavian Journal of Statistics 6, 1979;
W. G. Cochran, "Sampling Techniques", 1977 (ratios).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats

ONE_SEED = "one seed: no interval and no test"


class Interval(NamedTuple):
    """An estimate with its 95 % interval; `low` and `high` are None if the data give no interval."""

    mean: float
    low: float | None
    high: float | None


class PairedResult(NamedTuple):
    """Mean paired difference with its interval, the p-value of "no difference", and the reason for a missing one."""

    difference: Interval
    p_value: float | None
    note: str | None


def mean_interval(values: Sequence[float]) -> Interval:
    """Mean with its t interval; one value has no interval."""
    x = _finite(values, "values")
    return _t_interval(float(x.mean()), len(x), float(x.std(ddof=1)) / math.sqrt(len(x)) if len(x) > 1 else 0.0)


def ratio_interval(sums: Sequence[float], counts: Sequence[float]) -> Interval:
    """Sum of `sums` over sum of `counts` with its t interval: a mean over units of different size.

    Units (documents, blocks of a text) are sampled whole and weighted by size. The interval is that of the linearised
    ratio (Cochran, chapter 6).

    Args:
        sums: sum of the values of each unit. counts: number of values of each unit, above 0.
    """
    total, size = _finite(sums, "sums"), _finite(counts, "counts")
    if len(total) != len(size) or size.min() <= 0:
        raise ValueError(f"each of {len(total)} sums needs a count above 0; got {list(counts)!r}")
    n, mean = len(total), float(total.sum() / size.sum())
    error = math.sqrt(n / max(1, n - 1) * float(((total - mean * size) ** 2).sum())) / float(size.sum())
    return _t_interval(mean, n, error)


def _t_interval(mean: float, n: int, error: float) -> Interval:
    if n < 2:
        return Interval(mean, None, None)
    half = float(stats.t.ppf(0.975, n - 1)) * error
    return Interval(mean, mean - half, mean + half)


def paired_t_test(first: Sequence[float], second: Sequence[float]) -> PairedResult:
    """Paired t-test of `first` minus `second` (same seed at the same index in both)."""
    if len(first) != len(second):
        raise ValueError(f"a paired test needs lists of the same length; got {len(first)} and {len(second)}")
    x, y = _finite(first, "first"), _finite(second, "second")
    interval = mean_interval(list(x - y))
    if len(x) < 2:
        return PairedResult(interval, None, ONE_SEED)
    rounding = 1e-12 * max(float(np.abs(x).max()), float(np.abs(y).max()))
    if float((x - y).std(ddof=1)) <= rounding:  # rounding noise is no evidence
        equal = abs(interval.mean) <= rounding
        note = "equal in every seed" if equal else "the same difference in every seed: the t-test is undefined"
        return PairedResult(interval, 1.0 if equal else None, note)
    return PairedResult(interval, float(stats.ttest_rel(x, y).pvalue), None)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's correction for several tests; None (no test made) stays None and does not count."""
    order = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    running = 0.0
    for rank, (p, i) in enumerate(order):
        running = max(running, min(1.0, (len(order) - rank) * p))
        adjusted[i] = running
    return adjusted


def wilson_interval(correct: int, rows: int) -> Interval:
    """Accuracy `correct / rows` with Wilson's interval: the chance of sampling the rows, not of the seed."""
    interval = stats.binomtest(correct, rows).proportion_ci(0.95, method="wilson")
    return Interval(correct / rows, float(interval.low), float(interval.high))


def with_intervals(values: Mapping[str, Any]) -> dict[str, Any]:
    """Add Wilson's 95 % interval of each accuracy to the scores of a split, whose number of rows is under "rows"."""
    found = dict(values)
    rows = int(values.get("rows") or 0)
    for name in [key for key in values if rows and (key == "accuracy" or key.endswith("_accuracy"))]:
        interval = wilson_interval(round(values[name] * rows), rows)
        found[f"{name}_interval"] = [interval.low, interval.high]
    return found


def summarise(values_by_variant: Mapping[str, Sequence[float]], reference: str | None) -> list[dict[str, Any]]:
    """Return a row of statistics per variant; each variant is paired with `reference` seed by seed.

    Value k of every list belongs to the k-th seed. A list may stop early (runs still to come): pairs are the seeds that
    both variants have. Without a reference there are no differences; see `summarise_pairs`.

    Returns:
        rows with name, seeds, mean, low, high, difference ({mean, low, high} or None), p_value (paired t-test),
        p_adjusted (Holm over the variants), and note (the reason for a None).

    Raises:
        ValueError: the reference is not among the variants, a variant has no values, or a value is not finite.
    """
    if reference is not None and reference not in values_by_variant:
        raise ValueError(f"reference={reference!r} is not among the variants ({', '.join(values_by_variant)})")
    rows = []
    for name, values in values_by_variant.items():
        _finite(values, f"values of variant {name!r}")
        row: dict[str, Any] = {"name": name, "seeds": len(values), **mean_interval(values)._asdict()}
        row |= {"difference": None, "p_value": None, "note": ONE_SEED if len(values) < 2 else None}
        if reference is not None and name != reference:
            row |= _paired(values_by_variant, name, reference)
        rows.append(row)
    return _holm_adjusted(rows)


def summarise_pairs(
    values_by_variant: Mapping[str, Sequence[float]], pairs: Sequence[tuple[str, str]]
) -> list[dict[str, Any]]:
    """Return a row of statistics per pair of variants, first minus second, paired seed by seed.

    Returns:
        rows with name and against (the pair), seeds (common to both), difference, p_value, p_adjusted (Holm over the
        pairs) and note, as in `summarise`.
    """
    rows = []
    for first, second in pairs:
        tested = _paired(values_by_variant, first, second)
        seeds = min(len(values_by_variant[name]) for name in (first, second))
        rows.append({"name": first, "against": second, **tested, "seeds": seeds})
    return _holm_adjusted(rows)


def _paired(values_by_variant: Mapping[str, Sequence[float]], first: str, second: str) -> dict[str, Any]:
    for name in (first, second):
        if name not in values_by_variant:
            raise ValueError(f"pair ({first}, {second}): {name!r} is not among {', '.join(values_by_variant)}")
    values, base = values_by_variant[first], values_by_variant[second]
    n = min(len(values), len(base))
    test = paired_t_test(values[:n], base[:n])
    return {"difference": test.difference._asdict(), "p_value": test.p_value, "note": test.note}


def _holm_adjusted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for row, adjusted in zip(rows, holm([row["p_value"] for row in rows]), strict=True):
        row["p_adjusted"] = adjusted
    return rows


def _finite(values: Sequence[float], what: str) -> npt.NDArray[np.float64]:
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or len(x) == 0:
        raise ValueError(f"{what} must be a flat list with at least one number; got {list(values)!r}")
    if not np.isfinite(x).all():
        raise ValueError(f"{what} must be finite; got {list(values)!r} (leave failed runs out)")
    return x
