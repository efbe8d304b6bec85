"""Learning curves, and answers by distance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..formatting import Metric
from .style import MUTED, blank_figure, looks, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Records = Sequence[Mapping[str, Any]]  # the lines of one metrics.jsonl
MAX_POINTS = 120  # a longer curve is averaged in equal bins


def learning_curves(
    runs: Mapping[str, Sequence[Records]], metric: str = "accuracy", reference: str | None = None
) -> Figure:
    """Training loss and validation metric over steps: mean line per variant, band from the lowest to the highest seed.

    Args:
        runs: the records of each seed, by variant (ValueError if none has a loss or the metric).
    """
    line_looks, names = looks(runs, reference), (("train", "loss"), ("validation", metric))
    panels = {f"{s} {name}": {v: _curve(seeds, s, name) for v, seeds in runs.items()} for s, name in names}
    found = {title: {k: c for k, c in curves.items() if len(c)} for title, curves in panels.items()}
    found = {title: curves for title, curves in found.items() if curves}
    if not found:
        raise ValueError(f"no train or validation records with loss or {metric!r}: there is no curve to draw")
    figure, axes = blank_figure(5.4 * len(found), 3.4, 1, len(found))
    with style():
        for ax, (title, curves) in zip(axes[0], found.items(), strict=True):
            for name, (steps, mean, low, high) in curves.items():
                look, marker = line_looks[name], "o" if len(steps) == 1 else ""  # a line needs two points to be seen
                ax.plot(steps, mean, color=look.colour, ls=look.dash, marker=marker, ms=5, label=name)
                ax.fill_between(steps, low, high, color=look.colour, alpha=0.15, lw=0)
            ax.set(title=title, xlabel="step")
            ax.legend()
            if Metric(title.split()[-1]).percent:
                ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    return figure


def _curve(seeds: Sequence[Records], split: str, key: str) -> Any:
    """Steps, mean, lowest and highest over seeds at their common steps, in bins; empty if no record has the key."""
    values = []
    for records in seeds:
        chosen = [r for r in records if r.get("split") == split and isinstance(r.get(key), int | float)]
        values.append({r["step"]: float(r[key]) for r in chosen if math.isfinite(r[key])})
    values = [v for v in values if v]
    steps = sorted(set.intersection(*map(set, values))) if values else []
    if not steps:
        return ()
    lines = np.array([steps, *([v[step] for step in steps] for v in values)], dtype=float)
    bins = np.array_split(lines, min(MAX_POINTS, len(steps)), axis=1)
    at, *binned = np.stack([part.mean(axis=1) for part in bins], axis=1)
    return at, np.mean(binned, axis=0), np.min(binned, axis=0), np.max(binned, axis=0)


def answers_by_distance(
    lines: Mapping[str, Mapping[int, Sequence[float]]], chance: float, trained: float, xlabel: str, log: bool = False
) -> Figure:
    """Right answers against the distance from the cue: mean line per memory, band from the worst to the best seed.

    Args:
        lines: for each memory by distance the shares of the seeds; "no memory" is grey, "whole text" wide and pale.
        chance: share of right answers of a guess (dashed). trained: farthest distance in training (dotted).
    """
    chosen = looks(lines, "no memory")
    figure, ((ax,),) = blank_figure(8.0, 3.8)
    with style():
        ax.axvline(trained, color=MUTED, ls=":", lw=1, label="farthest in training")
        ax.axhline(100 * chance, color=MUTED, ls="--", lw=0.8, label="a guess")
        for name, shares in lines.items():
            at, look = sorted(shares), chosen[name]
            values = [[100 * share for share in shares[d]] for d in at]
            line: dict[str, Any] = {"lw": 6, "alpha": 0.35} if name == "whole text" else {"marker": look.marker}
            ax.plot(at, list(map(np.mean, values)), color=look.colour, ls=look.dash, ms=3.5, label=name, **line)
            ax.fill_between(at, list(map(min, values)), list(map(max, values)), color=look.colour, alpha=0.15, lw=0)
        if log:
            ax.set_xscale("log")
            ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.set(xlabel=xlabel, ylabel="right answers [%]", ylim=(0, 103))
        figure.legend(loc="outside right upper")
    return figure
