"""Numbers and findings in words: how a metric is printed, and what a comparison may claim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cached_lab.training.scores import kind_of

SIGNIFICANCE = 0.05
P_VALUES = ("p (uncorrected)", "p (Holm)")
"""Headings of the two where several differences are tested: of each by itself, and corrected for all of them."""
MISSING, MINUS = "\N{EN DASH}", "\N{MINUS SIGN}"


class Metric(NamedTuple):
    """How values of a metric are written: accuracies in per cent, anything else as it is."""

    name: str

    @property
    def percent(self) -> bool:
        """Whether the metric is a share of 1, shown in per cent and its differences in percentage points."""
        return kind_of(self.name).share

    @property
    def scale(self) -> float:
        """Factor from the stored to the shown value."""
        return 100.0 if self.percent else 1.0

    @property
    def lower_is_better(self) -> bool:
        """Whether a smaller value is the better one."""
        return kind_of(self.name).lower_is_better

    @property
    def axis_label(self) -> str:
        """Name with unit, for an axis."""
        return f"{self.name} [%]" if self.percent else self.name

    @property
    def difference_label(self) -> str:
        """Name with the unit of a difference, for an axis or a column."""
        return "percentage points" if self.percent else f"difference in {self.name}"

    def value(self, x: float | None, unit: bool = True) -> str:
        """`x` as text; an en dash for None."""
        if x is None:
            return MISSING
        return f"{100 * x:.2f}" + (" %" if unit else "") if self.percent else f"{x:.4g}"

    def difference(self, x: float | None, unit: bool = True) -> str:
        """A difference as text with its sign (a true minus, not a hyphen)."""
        if x is None:
            return MISSING
        text = f"{100 * x:+.2f}" + (" points" if unit else "") if self.percent else f"{x:+.3g}"
        return text.replace("-", MINUS)

    def interval(self, low: float | None, high: float | None, signed: bool = False) -> str:
        """`[low, high]`, or an empty text where there is no interval."""
        if low is None or high is None:
            return ""
        write = self.difference if signed else self.value
        return f"[{write(low, unit=False)}, {write(high, unit=False)}]"


def short_count(x: float | None) -> str:
    """A count with three significant digits and k, M, G, T or P."""
    if x is None:
        return MISSING
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(x) >= 0.9995 * size:
            return f"{x / size:.3g} {letter}"
    return f"{x:.3g}"


def short_seconds(x: float | None) -> str:
    """A duration in the unit that suits it, from microseconds to hours."""
    if x is None:
        return MISSING
    for size, unit in ((3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms")):
        if x >= size:
            return f"{x / size:.3g} {unit}"
    return f"{1e6 * x:.3g} µs"


def unknown_words(share: float) -> str:
    """How much of a text the vocabulary lacks, and what that means for its scores."""
    return f"unknown words (<unk>): {share:.2%} of the tokens, which lowers the loss; compare with the same vocabulary"


def short_p(p: float | None) -> str:
    """A p-value as text; never as zero."""
    if p is None:
        return MISSING
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


class DifferenceWords(NamedTuple):
    """A difference, its interval, p, and p after Holm, as text."""

    mean: str
    interval: str
    p: str
    holm: str


def difference_words(row: Mapping[str, Any], metric: Metric, unit: bool = True) -> DifferenceWords:
    """What a row of statistics says of its difference; dashes where it has none."""
    mean, low, high = (row["difference"][key] for key in ("mean", "low", "high")) if row["difference"] else [None] * 3
    interval = metric.interval(low, high, signed=True)
    return DifferenceWords(metric.difference(mean, unit), interval, short_p(row["p_value"]), short_p(row["p_adjusted"]))


def mean_of(values: Sequence[float] | None) -> float | None:
    """Their mean; None where there are none."""
    return sum(values) / len(values) if values else None


def pair_name(row: Mapping[str, Any]) -> str:
    """What a row of statistics compares: "a - b" for a pair, else the variant's name."""
    return f"{row['name']} {MINUS} {row['against']}" if "against" in row else str(row["name"])


def environment_text(environment: Mapping[str, Any] | None) -> str:
    """The environment of a run in one line: `torch 2.7, python 3.12, ...`; its date has a line of its own."""
    shown = {key: value for key, value in (environment or {}).items() if key != "date" and value not in (None, "")}
    return ", ".join(f"{key} {value}" for key, value in shown.items())


def comparison_summary(
    statistics: Sequence[Mapping[str, Any]],
    reference: str,
    metric: Metric,
    split: str,
    baselines: Mapping[str, float],
    pairs: Sequence[Mapping[str, Any]] = (),
) -> list[str]:
    """Sentences that say what the numbers show, and no more: one on the tests, one per variant, one on baselines.

    With `pairs` (of `statistics.summarise_pairs`) there is one per pair, and the reference is only named first.

    A difference counts as shown when the paired t-test, corrected for the number of variants, falls below 0.05.
    """
    rows = {row["name"]: row for row in statistics}
    base, others = rows[reference], [row for row in statistics if row["name"] != reference]
    mean = metric.value(base["mean"])
    opening = f"{reference} reaches {mean} {split} {metric.name}, averaged over {_seeds(base['seeds'])}."
    compared = [(row, reference) for row in others] if not pairs else [(row, str(row["against"])) for row in pairs]
    label = "Holm's p" if len(compared) > 1 else "p"
    sentences = [opening, *(_finding(row, against, metric, label) for row, against in compared)]
    sentences += _caveats([row for row, _ in compared])
    return sentences + _baseline_sentences(statistics, metric, baselines)


def run_summary(records: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], metric: Metric) -> list[str]:
    """Sentences on one training: how far it is, its best validation result, its test result, the best baseline."""
    best, test, baselines = summary.get("best"), summary.get("test"), summary.get("baselines") or {}
    last = max((record["step"] for record in records), default=0)
    if not summary:
        return [f"The run is not finished: its last record is of step {last:,}."]
    sentences = [f"Trained for {summary.get('steps', last):,} steps."]
    if best and metric.name in best:
        sentences.append(
            f"The best validation {metric.name} is {metric.value(best[metric.name])}, at step {best['step']:,}."
        )
    if test and metric.name in test:
        interval = metric.interval(*(test.get(f"{metric.name}_interval") or (None, None)))
        drawn = f"{test['rows']:,} rows" if "rows" in test else f"{test.get('sentences', 0):,} sentences"
        chance = f" (95 % interval {interval} for the chance in drawing its {drawn})" if interval else ""
        sentences.append(f"On the test split it reaches {metric.value(test[metric.name])}{chance}.")
        if baselines:
            sentences.append(_best_baseline(metric, baselines)[1])
    if summary.get("bad_files"):
        sentences.append(f"{summary['bad_files']:,} data files could not be used and were skipped (bad_files.json).")
    return [*sentences, "One run has no spread: a difference to another run may be chance."]


def _finding(row: Mapping[str, Any], reference: str, metric: Metric, label: str) -> str:
    difference, p = row["difference"], row["p_adjusted"]
    mean = difference["mean"]
    better = (mean < 0) if metric.lower_is_better else (mean > 0)
    size = metric.difference(mean).lstrip("+" + MINUS)
    side = "equal to" if mean == 0 else f"{size} {'better' if better else 'worse'} than"
    interval = metric.interval(difference["low"], difference["high"], signed=True)
    if p is None:
        why = "from one seed nothing can be concluded" if row["seeds"] < 2 else f"no test can be made ({row['note']})"
        return f"{row['name']} is {side} {reference} on average; {why}."
    evidence = f"{label} = {short_p(p)}".replace("= <", "<") + (f", 95 % interval {interval}" if interval else "")
    if p < SIGNIFICANCE:
        return f"{row['name']} is {side} {reference}, more than chance between seeds explains ({evidence})."
    return (
        f"Between {row['name']} and {reference} no difference can be shown with {_seeds(row['seeds'])} ({evidence}); "
        "that is not evidence that they are equal."
    )


def _caveats(others: Sequence[Mapping[str, Any]]) -> list[str]:
    smallest = [r["p_sign_flip_smallest"] for r in others if r["p_sign_flip_smallest"] is not None]
    if not smallest or max(smallest) < SIGNIFICANCE:
        return []
    return [
        "The t-test takes the seeds' differences to be normally distributed, which so few seeds cannot confirm: "
        f"a test without that assumption could not give less than p = {max(smallest):.3g} here."
    ]


def _baseline_sentences(
    statistics: Sequence[Mapping[str, Any]], metric: Metric, baselines: Mapping[str, float]
) -> list[str]:
    if not baselines:
        return []
    name, sentence = _best_baseline(metric, baselines)
    value = baselines[name]
    behind = [r["name"] for r in statistics if (r["mean"] >= value if metric.lower_is_better else r["mean"] <= value)]
    return [sentence, f"No better than that on average: {', '.join(behind)}."] if behind else [sentence]


def _best_baseline(metric: Metric, baselines: Mapping[str, float]) -> tuple[str, str]:
    """Name of the best guesser, and a sentence on it."""
    best = min if metric.lower_is_better else max
    name = best(baselines, key=lambda key: baselines[key])
    return name, f"Without a model, the baseline “{name}” reaches {metric.value(baselines[name])}."


def _seeds(n: int) -> str:
    return "one seed" if n == 1 else f"{n} seeds"
