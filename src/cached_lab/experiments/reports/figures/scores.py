"""Scores against cost, and differences of scores, from plain data.

Figure 1 of "Cached Transformers" (arXiv:2312.12742) has its counterpart in `metric_against_flops`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..formatting import Metric, short_count
from .style import INK, SURFACE, Look, blank_figure, looks, spread, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_LABELS = 4  # more names than this beside their points run into each other: a legend, best first, takes over


class Point(NamedTuple):
    """One variant in `metric_against_flops`."""

    name: str
    flops: float
    mean: float
    low: float | None = None
    high: float | None = None


class Difference(NamedTuple):
    """One variant in `differences`: its mean difference to the reference."""

    name: str
    mean: float
    low: float | None = None
    high: float | None = None


def metric_against_flops(points: Sequence[Point], metric: str = "accuracy", reference: str | None = None) -> Figure:
    """Metric over operations per forward pass, with intervals: the upper left is better (lower left for a loss)."""
    if not points or not all(p.flops > 0 for p in points):
        raise ValueError("metric_against_flops needs at least one variant, each with a positive number of operations")
    measure, variant_looks = Metric(metric), looks([p.name for p in points], reference)
    figure, axes = blank_figure(6.6, 3.8, 1, 1)
    ax = axes[0][0]
    with style():
        for p in sorted(points, key=lambda p: p.mean, reverse=not measure.lower_is_better):
            (colour, _, marker), y = variant_looks[p.name], measure.scale * p.mean
            if p.low is not None and p.high is not None:
                span = [[y - measure.scale * p.low], [measure.scale * p.high - y]]
                ax.errorbar([p.flops], [y], yerr=span, color=colour, capsize=3, lw=1.4)
            ax.plot([p.flops], [y], marker, color=colour, ms=7, mec=SURFACE, mew=1, label=p.name)
        low, high = min(p.flops for p in points), max(p.flops for p in points)
        if high > 10 * low:
            ax.set_xscale("log")
        ax.margins(x=0.18, y=0.12)
        ax.xaxis.set_major_formatter(lambda value, _: short_count(value))
        ax.set(title=f"{metric} against cost", xlabel="operations per forward pass", ylabel=measure.axis_label)
        if len(points) > MAX_LABELS:
            ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=9)
        else:
            _label_points(ax, points, measure, variant_looks)
    return figure


def differences(rows: Sequence[Difference], reference: str | None, metric: str = "accuracy") -> Figure:
    """Mean paired difference of each variant to the reference, with its interval; an interval over zero shows nothing.

    Without a reference the rows are pairs, and their names say of what.
    """
    if not rows:
        raise ValueError("differences needs at least one variant beside the reference")
    measure, variant_looks = Metric(metric), looks([r.name for r in rows])
    if reference is not None:
        variant_looks = looks([reference, *(r.name for r in rows)], reference)
    figure, axes = blank_figure(6.6, 0.9 + 0.42 * len(rows), 1, 1)
    ax = axes[0][0]
    with style():
        ax.axvline(0, color=INK, lw=1)
        for y, row in enumerate(rows):
            colour, _, marker = variant_looks[row.name]
            if row.low is not None and row.high is not None:
                ax.plot([measure.scale * row.low, measure.scale * row.high], [y, y], color=colour, lw=2.2)
            ax.plot([measure.scale * row.mean], [y], marker, color=colour, ms=7, mec=SURFACE, mew=1)
            text = measure.difference(row.mean, unit=False)
            ax.annotate(text, (1.02, y), xycoords=("axes fraction", "data"), va="center", fontsize=9)
        ax.set(yticks=range(len(rows)), ylim=(len(rows) - 0.5, -0.5))
        ax.set_yticklabels([r.name for r in rows], color=INK, fontsize=10)
        ax.tick_params(axis="y", length=0)
        ax.grid(False, axis="y")
        ax.spines["left"].set_visible(False)
        ax.margins(x=0.08)
        better = "left" if measure.lower_is_better else "right"
        title = "difference" if reference is None else f"difference to {reference}"
        ax.set(title=title, xlabel=f"{measure.difference_label} (better to the {better})")
    return figure


def _label_points(ax: Axes, points: Sequence[Point], measure: Metric, variant_looks: Mapping[str, Look]) -> None:
    """Names beside the points; of points with about the same cost the cheaper half has its names on the left."""
    low, high = ax.get_ylim()
    left, right = ax.get_xlim()
    log = ax.get_xscale() == "log"
    place = {p.name: (math.log(p.flops) if log else p.flops) for p in points}
    width = (math.log(right) - math.log(left)) if log else right - left
    clusters: list[list[Point]] = []
    for p in sorted(points, key=lambda p: p.flops):
        if clusters and place[p.name] - place[clusters[-1][-1].name] < 0.2 * width:
            clusters[-1].append(p)
        else:
            clusters.append([p])
    for cluster in clusters:
        half = len(cluster) // 2
        for side, group in ((-1, cluster[:half]), (1, cluster[half:])):
            heights = spread([measure.scale * p.mean for p in group], 0.065 * (high - low))
            for p, y in zip(group, heights, strict=True):
                label = ax.annotate(p.name, (p.flops, y), xytext=(9 * side, 0), textcoords="offset points", fontsize=9)
                label.set(color=variant_looks[p.name].colour, va="center", ha="left" if side > 0 else "right")
