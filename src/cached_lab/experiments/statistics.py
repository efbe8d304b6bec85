"""Statistics for comparing training runs: intervals, paired tests over seeds, intervals over rows.

Seeds are few, so every interval comes with its number of values, and a test that cannot be made returns None with a
note. Two sources of chance are kept apart: *seeds* (t interval, paired t-test, sign-flip test) and *rows of the
evaluation set* (Wilson interval). scipy lacks Holm's correction, and its permutation test takes seconds for 20 pairs.

Missing or non-finite values, pairs of different length and a level outside (0, 1) raise a ValueError.

References: E. B. Wilson, "Probable inference", JASA 22, 1927; S. Holm, Scandinavian Journal of Statistics 6, 1979;
R. A. Fisher, "The Design of Experiments", 1935 (sign flips); W. G. Cochran, "Sampling Techniques", 1977 (ratios).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats

MAX_SIGN_FLIP_PAIRS = 20  # 2^19 sums: still well under a second


class Interval(NamedTuple):
    """An estimate with its interval; `low` and `high` are None if the data give no interval."""

    mean: float
    low: float | None
    high: float | None


class PairedResult(NamedTuple):
    """Mean paired difference with its interval, the p-value of "no difference", and the reason for a missing one."""

    difference: Interval
    p_value: float | None
    note: str | None


def mean_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Mean with its t interval; one value has no interval."""
    _check_level(level)
    x = _finite(values, "values")
    mean = float(x.mean())
    if len(x) < 2:
        return Interval(mean, None, None)
    half = float(stats.t.ppf((1 + level) / 2, len(x) - 1)) * float(x.std(ddof=1)) / math.sqrt(len(x))
    return Interval(mean, mean - half, mean + half)


def ratio_interval(sums: Sequence[float], counts: Sequence[float], level: float = 0.95) -> Interval:
    """Sum of `sums` over sum of `counts` with its t interval: a mean over units of different size.

    Units (documents, blocks of a text) are sampled whole and weighted by size. The interval is that of the linearised
    ratio (Cochran, chapter 6).

    Args:
        sums: sum of the values of each unit. counts: number of values of each unit.

    Raises:
        ValueError: lengths differ, a number is not finite, or a unit has no values.
    """
    _check_level(level)
    total, size = _finite(sums, "sums"), _finite(counts, "counts")
    if len(total) != len(size) or size.min() <= 0:
        raise ValueError(f"each of {len(total)} sums needs a count above 0; got {list(counts)!r}")
    n, mean = len(total), float(total.sum() / size.sum())
    if n < 2:
        return Interval(mean, None, None)
    error = math.sqrt(n / (n - 1) * float(((total - mean * size) ** 2).sum())) / float(size.sum())
    half = float(stats.t.ppf((1 + level) / 2, n - 1)) * error
    return Interval(mean, mean - half, mean + half)


def paired_t_test(first: Sequence[float], second: Sequence[float], level: float = 0.95) -> PairedResult:
    """Paired t-test of `first` minus `second` (same seed at the same index in both)."""
    difference = _differences(first, second)
    interval = mean_interval(list(difference), level)
    if len(difference) < 2:
        return PairedResult(interval, None, "one seed: no interval and no test")
    spread = float(difference.std(ddof=1))
    scale = max(float(np.abs(_finite(first, "first")).max()), float(np.abs(_finite(second, "second")).max()))
    if spread <= 1e-12 * scale:  # rounding noise is no evidence
        equal = abs(interval.mean) <= 1e-12 * scale
        note = "equal in every seed" if equal else "the same difference in every seed: the t-test is undefined"
        return PairedResult(interval, 1.0 if equal else None, note)
    return PairedResult(interval, float(stats.ttest_rel(first, second).pvalue), None)


def sign_flip_test(first: Sequence[float], second: Sequence[float]) -> float:
    """Exact two-sided permutation p-value of the mean paired difference, over all 2^n sign patterns.

    Assumes only that, without an effect, each difference has either sign with equal probability.

    Raises:
        ValueError: lengths differ, values are missing or not finite, or more than 20 pairs.
    """
    difference = _differences(first, second)
    if len(difference) > MAX_SIGN_FLIP_PAIRS:
        raise ValueError(
            f"{len(difference)} pairs have too many sign patterns (at most {MAX_SIGN_FLIP_PAIRS}); use paired_t_test"
        )
    sums = difference[:1]  # the first sign stays fixed: the two-sided test is symmetric
    for d in difference[1:]:
        sums = np.concatenate([sums + d, sums - d])
    observed = abs(float(difference.sum()))
    tolerance = 1e-12 * float(np.abs(difference).sum())
    return float(np.mean(np.abs(sums) >= observed - tolerance))


def smallest_sign_flip_p(pairs: int) -> float:
    """Smallest p-value of `sign_flip_test` with this number of pairs: 2 / 2^n (ValueError below 1)."""
    if pairs < 1:
        raise ValueError(f"pairs={pairs} must be at least 1")
    return 2.0 ** (1 - pairs)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's correction for several tests; None (no test made) stays None and does not count."""
    order = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    running = 0.0
    for rank, (p, i) in enumerate(order):
        running = max(running, min(1.0, (len(order) - rank) * p))
        adjusted[i] = running
    return adjusted


def wilson_interval(correct: int, rows: int, level: float = 0.95) -> Interval:
    """Accuracy `correct / rows` with Wilson's interval: the chance of sampling the rows, not of the seed."""
    _check_level(level)
    if rows < 1 or not 0 <= correct <= rows:
        raise ValueError(f"correct={correct} must lie in 0..rows and rows={rows} must be at least 1")
    interval = stats.binomtest(correct, rows).proportion_ci(level, method="wilson")
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
        p_adjusted (Holm over the variants), p_sign_flip and p_sign_flip_smallest (exact test, and its smallest possible
        value), and note (the reason for a None).

    Raises:
        ValueError: the reference is not among the variants, a variant has no values, or a value is not finite.
    """
    if reference is not None and reference not in values_by_variant:
        raise ValueError(f"reference={reference!r} is not among the variants ({', '.join(values_by_variant)})")
    rows = []
    for name, values in values_by_variant.items():
        _finite(values, f"values of variant {name!r}")
        row: dict[str, Any] = {"name": name, "seeds": len(values), **mean_interval(values)._asdict()}
        row |= dict.fromkeys(("difference", "p_value", "p_adjusted", "p_sign_flip", "p_sign_flip_smallest"))
        row["note"] = "one seed: no interval and no test" if len(values) < 2 else None
        if reference is not None and name != reference:
            row |= _paired(values, values_by_variant[reference])
        rows.append(row)
    return _holm_adjusted(rows)


def summarise_pairs(
    values_by_variant: Mapping[str, Sequence[float]], pairs: Sequence[tuple[str, str]]
) -> list[dict[str, Any]]:
    """Return a row of statistics per pair of variants, first minus second, paired seed by seed.

    Returns:
        rows with name and against (the pair), seeds (common to both), difference, p_value, p_adjusted (Holm over the
        pairs), p_sign_flip, p_sign_flip_smallest and note, as in `summarise`.
    """
    rows = []
    for first, second in pairs:
        for name in (first, second):
            if name not in values_by_variant:
                raise ValueError(f"pair ({first}, {second}): {name!r} is not among {', '.join(values_by_variant)}")
            _finite(values_by_variant[name], f"values of variant {name!r}")
        values, base = values_by_variant[first], values_by_variant[second]
        row: dict[str, Any] = {"name": first, "against": second, "seeds": min(len(values), len(base))}
        rows.append(row | {"p_sign_flip": None, "p_sign_flip_smallest": None} | _paired(values, base))
    return _holm_adjusted(rows)


def _paired(values: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    n = min(len(values), len(base))
    test = paired_t_test(values[:n], base[:n])
    row: dict[str, Any] = {"difference": test.difference._asdict(), "p_value": test.p_value, "note": test.note}
    if 2 <= n <= MAX_SIGN_FLIP_PAIRS:
        row["p_sign_flip"] = sign_flip_test(values[:n], base[:n])
        row["p_sign_flip_smallest"] = smallest_sign_flip_p(n)
    return row


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


def _differences(first: Sequence[float], second: Sequence[float]) -> npt.NDArray[np.float64]:
    if len(first) != len(second):
        raise ValueError(f"a paired test needs lists of the same length; got {len(first)} and {len(second)}")
    return _finite(first, "first") - _finite(second, "second")


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level={level} must lie in (0, 1); 0.95 is usual")
