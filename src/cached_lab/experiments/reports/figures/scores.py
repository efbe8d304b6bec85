"""Differences of scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..formatting import Metric
from .style import INK, SURFACE, blank_figure, looks, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class DifferenceBar(NamedTuple):
    """One variant in `differences`: its mean difference to the reference."""

    name: str
    mean: float
    low: float | None = None
    high: float | None = None


def differences(rows: Sequence[DifferenceBar], reference: str | None, metric: str = "accuracy") -> Figure:
    """Mean paired differences with their intervals; an interval over zero shows no difference.

    Args:
        reference: the variant that the others are compared with; None for pairs, which the names state.
    """
    if not rows:
        raise ValueError("differences needs at least one variant beside the reference")
    measure = Metric(metric)
    names = [r.name for r in rows]
    variant_looks = looks(names) if reference is None else looks([reference, *names], reference)
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
        ax.set_yticklabels(names, color=INK, fontsize=10)
        ax.tick_params(axis="y", length=0)
        ax.grid(False, axis="y")
        ax.spines["left"].set_visible(False)
        ax.margins(x=0.08)
        better = "left" if measure.lower_is_better else "right"
        title = "difference" if reference is None else f"difference to {reference}"
        ax.set(title=title, xlabel=f"{measure.difference_label} (better to the {better})")
    return figure
