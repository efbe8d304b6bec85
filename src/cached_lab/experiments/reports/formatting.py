"""Numbers as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from cached_lab.training.scores import kind_of

MISSING, MINUS = "\N{EN DASH}", "\N{MINUS SIGN}"


class Metric(NamedTuple):
    """Format of a metric's values: accuracies in per cent, other metrics unchanged."""

    name: str

    @property
    def percent(self) -> bool:
        """True for a share of 1, shown in per cent; its differences are in percentage points."""
        return kind_of(self.name).share

    @property
    def lower_is_better(self) -> bool:
        """True if a smaller value is better."""
        return kind_of(self.name).lower_is_better

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


def share_text(x: float | None) -> str:
    """A share of 1 that may be negative, such as an efficiency; an en dash for None."""
    return MISSING if x is None else f"{x:.3f}".replace("-", MINUS)


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
    return MISSING if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def counted(n: int, word: str) -> str:
    """`one seed`, `3 seeds`."""
    return f"one {word}" if n == 1 else f"{n} {word}s"


def environment_text(environment: Mapping[str, Any] | None) -> str:
    """The environment of a run in one line, without its date: `torch 2.7, python 3.12, ...`."""
    shown = {key: value for key, value in (environment or {}).items() if key != "date" and value not in (None, "")}
    return ", ".join(f"{key} {value}" for key, value in shown.items())
