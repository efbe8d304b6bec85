"""Every formula against old values, scipy or a full enumeration, and the notes of tests that cannot be made."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from common import refuses

from cached_lab.experiments import statistics as stats

GENERATOR = np.random.default_rng(7)


WILSON = {
    (0, 10): (0.0, 0.27753279986288915),
    (7, 10): (0.39677814746114537, 0.8922087325936989),
    (1, 1): (0.20654931437723745, 1.0),
    (39731, 50000): (0.7910564627598408, 0.7981382698941021),
}


def test_intervals_over_rows_and_of_equal_values() -> None:
    for (correct, rows), ends in WILSON.items():
        assert tuple(stats.wilson_interval(correct, rows)) == pytest.approx(
            (correct / rows, *ends), rel=1e-10, abs=1e-10
        )
    assert stats.mean_interval([0.5, 0.5, 0.5]) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize("n", [2, 3, 5, 12])
def test_mean_interval(n: int) -> None:
    x = GENERATOR.normal(0.9, 0.02, n)
    low, high = scipy.stats.t.interval(0.95, n - 1, x.mean(), scipy.stats.sem(x))
    assert stats.mean_interval(x) == pytest.approx((x.mean(), low, high))


@pytest.mark.parametrize("n", [2, 3, 5, 12])
def test_paired_t_test(n: int) -> None:
    x, y = GENERATOR.normal(0.9, 0.02, n), GENERATOR.normal(0.88, 0.02, n)
    expected = scipy.stats.ttest_rel(x, y)
    result = stats.paired_t_test(x, y)
    assert result.p_value == pytest.approx(expected.pvalue)
    interval = expected.confidence_interval(0.95)
    assert result.difference == pytest.approx(((x - y).mean(), interval.low, interval.high))
    assert result.note is None


def test_paired_t_test_where_it_is_undefined_and_holm() -> None:
    one = stats.paired_t_test([0.9], [0.8])
    assert one.p_value is None and one.difference.low is None and "one seed" in str(one.note)
    assert stats.paired_t_test([0.1, 0.2], [0.1, 0.2]).p_value == 1
    constant = stats.paired_t_test([0.3, 0.4, 0.7], [0.2, 0.3, 0.6])  # differences equal up to rounding
    assert constant.p_value is None and "same difference" in str(constant.note)
    assert stats.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert stats.holm([None, 0.02, None, 0.6]) == [None, 0.04, None, 0.6]
    assert stats.holm([]) == []


def test_summarise_whole_and_with_runs_to_come() -> None:
    values = {"plain": [0.90, 0.91, 0.92], "grc": [0.92, 0.92, 0.94], "xl": [0.90, 0.92, 0.91]}
    plain, grc, xl = stats.summarise(values, "plain")
    assert plain["difference"] is None and plain["p_value"] is None and plain["p_adjusted"] is None
    assert grc["difference"]["mean"] == pytest.approx(0.05 / 3)
    assert grc["p_value"] == pytest.approx(scipy.stats.ttest_rel(values["grc"], values["plain"]).pvalue)
    assert grc["p_adjusted"] == pytest.approx(min(1, 2 * grc["p_value"])) and xl["p_adjusted"] >= xl["p_value"]
    assert grc["seeds"] == 3 and grc["low"] < grc["mean"] < grc["high"] and grc["note"] is None
    plain, grc = stats.summarise({"plain": [0.9], "grc": [0.95]}, "plain")
    assert grc["low"] is None and grc["p_value"] is None and grc["difference"]["low"] is None
    assert "one seed" in grc["note"] and "one seed" in plain["note"]
    _, partial = stats.summarise({"plain": [0.90, 0.91, 0.92], "grc": [0.93, 0.92]}, "plain")
    assert partial["difference"]["mean"] == pytest.approx(0.02)


def test_pairs_are_compared_each_with_its_own() -> None:
    values = {"a": [0.1, 0.2, 0.4], "b": [0.2, 0.2, 0.3], "c": [0.5, 0.4, 0.7, 0.6]}
    first, second = stats.summarise_pairs(values, [("c", "a"), ("c", "b")])
    assert (first["name"], first["against"], first["seeds"]) == ("c", "a", 3)
    for row, base in ((first, "a"), (second, "b")):
        alone = stats.summarise({base: values[base], "c": values["c"]}, base)[1]
        kept = ("difference", "p_value", "note")
        assert {key: row[key] for key in kept} == {key: alone[key] for key in kept}
    smaller, larger = sorted((first, second), key=lambda row: row["p_value"])
    assert smaller["p_adjusted"] == pytest.approx(min(1, 2 * smaller["p_value"]))
    assert larger["p_adjusted"] == pytest.approx(max(larger["p_value"], smaller["p_adjusted"]))
    assert all(row["difference"] is None and row["p_adjusted"] is None for row in stats.summarise(values, None))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: stats.summarise_pairs({"a": [1.0]}, [("a", "b")]), r"pair \(a, b\): 'b' is not among a"),
        (lambda: stats.summarise_pairs({"a": [1.0], "b": []}, [("a", "b")]), "at least one number"),
        (lambda: stats.summarise({"a": [1.0]}, "plain"), "reference='plain' is not among"),
        (lambda: stats.summarise({"a": [1.0, float("nan")]}, "a"), "variant 'a' must be finite"),
        (lambda: stats.summarise({"a": []}, "a"), "at least one number"),
        (lambda: stats.paired_t_test([1.0], [1.0, 2.0]), "same length"),
    ],
)
def test_bad_input(call, message: str) -> None:
    refuses(message, call)


def test_a_ratio_weighs_units_by_their_size_and_of_equal_ones_is_a_mean():
    values = GENERATOR.normal(size=9)
    assert stats.ratio_interval(7 * values, [7] * 9) == pytest.approx(stats.mean_interval(values))
    assert stats.ratio_interval([3.0], [2]) == (1.5, None, None)
    # Twin: the bootstrap, which draws units whole.
    counts = GENERATOR.integers(1, 40, size=60)
    sums = counts * 0.3 + GENERATOR.normal(size=60) * np.sqrt(counts)
    drawn = GENERATOR.integers(0, 60, size=(20_000, 60))
    low, high = np.quantile(sums[drawn].sum(1) / counts[drawn].sum(1), [0.025, 0.975])
    found = stats.ratio_interval(sums, counts)
    assert found.mean == pytest.approx(sums.sum() / counts.sum())
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.12 * (high - low))
    assert abs(found.mean - (sums / counts).mean()) > 0.01, "which is not the mean of the units' means"


@pytest.mark.parametrize(("sums", "counts"), [([1.0, 2.0], [1]), ([1.0, 2.0], [1, 0])])
def test_a_unit_without_values_is_refused(sums, counts):
    refuses("each of 2 sums needs a count above 0", stats.ratio_interval, sums, counts)
