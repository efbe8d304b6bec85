"""Statistics for comparing training runs: intervals, paired tests over seeds, tests over rows.

Seeds are few, so every interval says how many values it rests on, and a test that cannot be made returns None with a
note instead of a number. Two sources of chance are kept apart: *seeds* (t interval, paired t-test, sign-flip test) and
*rows of the evaluation set* (Wilson interval, McNemar test).

References: E. B. Wilson, "Probable inference", JASA 22, 1927; Q. McNemar, Psychometrika 12, 1947;
S. Holm, Scandinavian Journal of Statistics 6, 1979; R. A. Fisher, "The Design of Experiments", 1935 (sign flips).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

MAX_SIGN_FLIP_PAIRS = 20  # 2^19 sums: still well under a second


class Interval(NamedTuple):
    """An estimate with its interval; `low` and `high` are None where the data carry no interval."""

    mean: float
    low: float | None
    high: float | None


class PairedResult(NamedTuple):
    """Mean paired difference with its interval, the p-value of "no difference", and why either is missing."""

    difference: Interval
    p_value: float | None
    note: str | None


def incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function I_x(a, b), by its continued fraction (Lentz's scheme).

    Raises:
        ValueError: a or b is not positive, or x lies outside [0, 1].
    """
    if not (a > 0 and b > 0 and 0 <= x <= 1):
        raise ValueError(f"incomplete_beta needs a > 0, b > 0 and x in [0, 1]; got a={a}, b={b}, x={x}")
    if x in (0.0, 1.0):
        return float(x)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast only below this point
        return 1.0 - incomplete_beta(b, a, 1.0 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    tiny = 1e-300
    c, d, fraction = 1.0, 0.0, 1.0
    for i in range(20_000):
        m = i // 2
        if i == 0:
            term = 1.0
        elif i % 2 == 0:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1.0 / ((1.0 + term * d) or tiny)
        c = (1.0 + term / c) or tiny
        fraction *= c * d
        if i > 0 and abs(1.0 - c * d) < 1e-15:
            break
    return math.exp(log_front) * (fraction - 1.0) / a


def t_two_sided_p(t: float, degrees: float) -> float:
    """Probability that |T| of Student's distribution with `degrees` degrees of freedom is at least |t|."""
    return incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))


def t_quantile(level: float, degrees: float) -> float:
    """The t with P(|T| <= t) = `level`, by bisection of the distribution function.

    Raises:
        ValueError: level is not in (0, 1), or degrees is not positive.
    """
    _check_level(level)
    if not degrees > 0:
        raise ValueError(f"degrees={degrees} must be positive")
    low, high = 0.0, 1.0
    while t_two_sided_p(high, degrees) > 1 - level:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if t_two_sided_p(middle, degrees) > 1 - level:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def mean_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Mean with its t interval; one value has a mean and no interval.

    Raises:
        ValueError: no values, a value that is not finite, or a level outside (0, 1).
    """
    _check_level(level)
    x = _finite(values, "values")
    mean = float(x.mean())
    if len(x) < 2:
        return Interval(mean, None, None)
    half = t_quantile(level, len(x) - 1) * float(x.std(ddof=1)) / math.sqrt(len(x))
    return Interval(mean, mean - half, mean + half)


def paired_t_test(first: Sequence[float], second: Sequence[float], level: float = 0.95) -> PairedResult:
    """Paired t-test of `first` minus `second` (same seed at the same place in both).

    Raises:
        ValueError: lengths differ, no values, or a value that is not finite.
    """
    difference = _differences(first, second)
    interval = mean_interval(list(difference), level)
    n = len(difference)
    if n < 2:
        return PairedResult(interval, None, "one seed: no interval and no test")
    spread = float(difference.std(ddof=1))
    scale = max(float(np.abs(_finite(first, "first")).max()), float(np.abs(_finite(second, "second")).max()))
    if spread <= 1e-12 * scale:  # rounding noise is no evidence
        equal = abs(interval.mean) <= 1e-12 * scale
        note = "equal in every seed" if equal else "the same difference in every seed: the t-test is undefined"
        return PairedResult(interval, 1.0 if equal else None, note)
    return PairedResult(interval, t_two_sided_p(interval.mean / (spread / math.sqrt(n)), n - 1), None)


def sign_flip_test(first: Sequence[float], second: Sequence[float]) -> float:
    """Exact two-sided permutation p-value of the mean paired difference, over all 2^n sign patterns.

    Assumes nothing but that, without an effect, each difference could as well have had the other sign.

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
    """The smallest p-value that `sign_flip_test` can give with so many pairs: 2 / 2^n.

    Raises:
        ValueError: pairs < 1.
    """
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
    """Accuracy `correct / rows` with Wilson's interval: the chance in drawing the rows, not in the seed.

    Raises:
        ValueError: rows < 1, correct outside 0..rows, or a level outside (0, 1).
    """
    _check_level(level)
    if rows < 1 or not 0 <= correct <= rows:
        raise ValueError(f"correct={correct} must lie in 0..rows and rows={rows} must be at least 1")
    z = NormalDist().inv_cdf((1 + level) / 2)
    share = correct / rows
    centre = (share + z * z / (2 * rows)) / (1 + z * z / rows)
    half = z * math.sqrt(share * (1 - share) / rows + z * z / (4 * rows * rows)) / (1 + z * z / rows)
    # At the ends the exact bound is 0 or 1; rounding must not leave the estimate outside its own interval.
    low = 0.0 if correct == 0 else max(0.0, centre - half)
    high = 1.0 if correct == rows else min(1.0, centre + half)
    return Interval(share, low, high)


class McNemarResult(NamedTuple):
    """Rows that only the first (second) model has right, and the exact two-sided p-value."""

    only_first: int
    only_second: int
    p_value: float


def mcnemar_test(first_correct: Sequence[bool], second_correct: Sequence[bool]) -> McNemarResult:
    """Exact McNemar test on the rows where two models disagree (a fair coin under "no difference").

    Raises:
        ValueError: lengths differ or there are no rows.
    """
    if len(first_correct) != len(second_correct) or len(first_correct) == 0:
        raise ValueError(
            f"both models need the same rows, at least one; got {len(first_correct)} and {len(second_correct)}"
        )
    first, second = np.asarray(first_correct, dtype=bool), np.asarray(second_correct, dtype=bool)
    only_first, only_second = int((first & ~second).sum()), int((~first & second).sum())
    few, n = min(only_first, only_second), only_first + only_second
    tail = 1.0 if n == 0 else incomplete_beta(n - few, few + 1, 0.5)  # P(X <= few), X ~ Binomial(n, 1/2)
    return McNemarResult(only_first, only_second, min(1.0, 2 * tail))


def bootstrap_interval(
    values: Sequence[float],
    statistic: Callable[[npt.NDArray[np.float64]], float] = np.mean,  # type: ignore[assignment]
    level: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap interval of `statistic`; the same seed gives the same interval.

    Raises:
        ValueError: fewer than two values, a value that is not finite, resamples < 1, or a level outside (0, 1).
    """
    _check_level(level)
    x = _finite(values, "values")
    if len(x) < 2 or resamples < 1:
        raise ValueError(f"a bootstrap needs two values and one resample at least; got {len(x)} and {resamples}")
    generator = np.random.default_rng(seed)
    drawn = [float(statistic(x[generator.integers(0, len(x), len(x))])) for _ in range(resamples)]
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(statistic(x)), float(low), float(high))


def summarise(
    values_by_variant: Mapping[str, Sequence[float]], reference: str | None, level: float = 0.95
) -> list[dict[str, Any]]:
    """One row of statistics per variant, in the order given; each variant is paired with `reference` seed by seed.

    Value k of every list belongs to the k-th seed. A list may stop early (runs still to come): pairs are made of the
    seeds that both variants have. Without a reference there are no differences; `summarise_pairs` gives them.

    Returns:
        rows with name, seeds, mean, low, high, difference ({mean, low, high} or None), p_value (paired t-test),
        p_adjusted (Holm over the variants), p_sign_flip and p_sign_flip_smallest (exact test and the smallest value
        it can take with so many seeds), and note (why something is None).

    Raises:
        ValueError: the reference is not among the variants, a variant has no values, or a value is not finite.
    """
    if reference is not None and reference not in values_by_variant:
        raise ValueError(f"reference={reference!r} is not among the variants ({', '.join(values_by_variant)})")
    rows = []
    for name, values in values_by_variant.items():
        _finite(values, f"values of variant {name!r}")
        row: dict[str, Any] = {"name": name, "seeds": len(values), **mean_interval(values, level)._asdict()}
        note = "one seed: no interval and no test" if len(values) < 2 else None
        row |= dict.fromkeys(("difference", "p_value", "p_adjusted", "p_sign_flip", "p_sign_flip_smallest"))
        row["note"] = note
        if reference is not None and name != reference:
            row |= _paired(values, values_by_variant[reference], level)
        rows.append(row)
    return _holm_adjusted(rows)


def summarise_pairs(
    values_by_variant: Mapping[str, Sequence[float]], pairs: Sequence[tuple[str, str]], level: float = 0.95
) -> list[dict[str, Any]]:
    """One row of statistics per pair of variants, first minus second, paired seed by seed.

    Returns:
        rows with name and against (the pair), seeds (that both have), difference, p_value, p_adjusted (Holm over the
        pairs), p_sign_flip, p_sign_flip_smallest and note, as in `summarise`.

    Raises:
        ValueError: a variant that is not there, has no values, or has a value that is not finite.
    """
    rows = []
    for first, second in pairs:
        for name in (first, second):
            if name not in values_by_variant:
                raise ValueError(f"pair ({first}, {second}): {name!r} is not among {', '.join(values_by_variant)}")
            _finite(values_by_variant[name], f"values of variant {name!r}")
        values, base = values_by_variant[first], values_by_variant[second]
        row: dict[str, Any] = {"name": first, "against": second, "seeds": min(len(values), len(base))}
        rows.append(row | {"p_sign_flip": None, "p_sign_flip_smallest": None} | _paired(values, base, level))
    return _holm_adjusted(rows)


def _paired(values: Sequence[float], base: Sequence[float], level: float) -> dict[str, Any]:
    n = min(len(values), len(base))
    test = paired_t_test(values[:n], base[:n], level)
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
