"""Numbers as text, and the sentences that a comparison or a run supports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cached_lab.training.scores import kind_of

SIGNIFICANCE = 0.05
P_VALUES = ("p (uncorrected)", "p (Holm)")
"""Column names when several differences are tested."""
MISSING, MINUS = "\N{EN DASH}", "\N{MINUS SIGN}"


class Metric(NamedTuple):
    """Format of a metric's values: accuracies in per cent, other metrics unchanged."""

    name: str

    @property
    def percent(self) -> bool:
        """True for a share of 1, shown in per cent; its differences are in percentage points."""
        return kind_of(self.name).share

    @property
    def scale(self) -> float:
        """Factor from the stored to the shown value."""
        return 100.0 if self.percent else 1.0

    @property
    def lower_is_better(self) -> bool:
        """True if a smaller value is better."""
        return kind_of(self.name).lower_is_better

    @property
    def axis_label(self) -> str:
        """Name with unit, for an axis."""
        return f"{self.name} [%]" if self.percent else self.name

    @property
    def difference_label(self) -> str:
        """Name with the unit of a difference, for an axis."""
        return "percentage points" if self.percent else f"difference in {self.name}"

    def value(self, x: float | None, unit: bool = True) -> str:
        """`x` as text; an en dash for None."""
        if x is None:
            return MISSING
        return f"{100 * x:.2f}" + (" %" if unit else "") if self.percent else f"{x:.4g}"

    def difference(self, x: float | None, unit: bool = True) -> str:
        """A difference as text, with a true minus sign; an en dash for None."""
        if x is None:
            return MISSING
        text = f"{100 * x:+.2f}" + (" points" if unit else "") if self.percent else f"{x:+.3g}"
        return text.replace("-", MINUS)

    def interval(self, low: float | None, high: float | None, signed: bool = False) -> str:
        """`[low, high]`, or an empty text if one of them is None."""
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
    """A duration with its unit, from microseconds to hours."""
    if x is None:
        return MISSING
    for size, unit in ((3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms")):
        if x >= size:
            return f"{x / size:.3g} {unit}"
    return f"{1e6 * x:.3g} µs"


def short_p(p: float | None) -> str:
    """A p-value as text; never zero."""
    if p is None:
        return MISSING
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def unknown_words(share: float) -> str:
    """The share of tokens that the vocabulary lacks, and its effect on the scores."""
    return f"unknown words (<unk>): {share:.2%} of the tokens, which lowers the loss; compare with the same vocabulary"


def counted(n: int, word: str) -> str:
    """`one seed`, `3 seeds`."""
    return f"one {word}" if n == 1 else f"{n} {word}s"


def pair_name(row: Mapping[str, Any]) -> str:
    """The compared variants of a row of statistics: "a - b" for a pair, else the variant's name."""
    return f"{row['name']} {MINUS} {row['against']}" if "against" in row else str(row["name"])


def environment_text(environment: Mapping[str, Any] | None) -> str:
    """The environment of a run in one line, without its date: `torch 2.7, python 3.12, ...`."""
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
    """Sentences that the numbers support: the reference's mean, one per difference, and the best baseline.

    With `pairs` (of `statistics.summarise_pairs`) there is a sentence per pair. A difference counts as shown if the
    paired t-test, corrected for the number of differences, falls below 0.05.
    """
    base = next(row for row in statistics if row["name"] == reference)
    seeds = counted(base["seeds"], "seed")
    sentences = [f"{reference} reaches {metric.value(base['mean'])} {split} {metric.name}, averaged over {seeds}."]
    compared = pairs or [row for row in statistics if row["name"] != reference]
    label = "Holm's p" if len(compared) > 1 else "p"
    sentences += [_finding(row, str(row.get("against", reference)), metric, label) for row in compared]
    if baselines:
        value, sentence = best_baseline(metric, baselines)
        sentences.append(sentence)
        worse = [
            r["name"] for r in statistics if (r["mean"] >= value if metric.lower_is_better else r["mean"] <= value)
        ]
        sentences += [f"No better than that on average: {', '.join(worse)}."] if worse else []
    return sentences


def _finding(row: Mapping[str, Any], reference: str, metric: Metric, label: str) -> str:
    difference, p, seeds = row["difference"], row["p_adjusted"], counted(row["seeds"], "seed")
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
        f"Between {row['name']} and {reference} no difference can be shown with {seeds} ({evidence}); "
        "that is not evidence that they are equal."
    )


def run_summary(records: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], metric: Metric) -> list[str]:
    """Sentences on one training: its steps, its best validation result, its test result, the best baseline."""
    best, test, baselines = summary.get("best"), summary.get("test"), summary.get("baselines")
    last = max((record["step"] for record in records), default=0)
    if not summary:
        return [f"The run is not finished: its last record is of step {last:,}."]
    sentences = [f"Trained for {summary.get('steps', last):,} steps."]
    if best and metric.name in best:
        value = metric.value(best[metric.name])
        sentences.append(f"The best validation {metric.name} is {value}, at step {best['step']:,}.")
    if test and metric.name in test:
        interval = metric.interval(*(test.get(f"{metric.name}_interval") or (None, None)))
        sampled = f"{test['rows']:,} rows" if "rows" in test else f"{test.get('sentences', 0):,} sentences"
        chance = f" (95 % interval {interval} for the sampling of its {sampled})" if interval else ""
        sentences.append(f"On the test split it reaches {metric.value(test[metric.name])}{chance}.")
        if baselines:
            sentences.append(best_baseline(metric, baselines)[1])
    if summary.get("bad_files"):
        sentences.append(f"{summary['bad_files']:,} data files could not be used and were skipped (bad_files.json).")
    return [*sentences, "One run has no spread: a difference to another run may be chance."]


def best_baseline(metric: Metric, baselines: Mapping[str, float]) -> tuple[float, str]:
    """Score of the best baseline, and a sentence on it."""
    best = min if metric.lower_is_better else max
    name = best(baselines, key=lambda key: baselines[key])
    return baselines[name], f"Without a model, the baseline “{name}” reaches {metric.value(baselines[name])}."
