"""Lines over steps, places and lengths, from plain data.

Every function of this folder takes numbers and names, returns a matplotlib `Figure`, and touches neither pyplot nor any
global state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..formatting import Metric, short_count
from .style import REFERENCE, SERIES, Look, blank_figure, looks, spread, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = npt.NDArray[np.floating[Any]]
Records = Sequence[Mapping[str, Any]]  # the lines of one metrics.jsonl
MAX_POINTS = 120  # a longer curve is averaged in equal bins: what a line of this width can show


def learning_curves(
    runs: Mapping[str, Sequence[Records]], metric: str = "accuracy", reference: str | None = None
) -> Figure:
    """Loss and metric over training steps: mean line per variant, band from the lowest to the highest seed.

    One variant shows training and validation in each panel; several show training loss beside validation metric.

    Args:
        runs: the records of each seed, by variant.
    """
    if len(runs) == 1:
        seeds = next(iter(runs.values()))
        splits = {"train": Look(REFERENCE, "-"), "validation": Look(SERIES[0], "-")}
        names = dict.fromkeys(["loss", metric])
        panels = [(name, {split: _curve(seeds, split, name) for split in splits}, splits) for name in names]
    else:
        variant_looks = looks(runs, reference)
        panels = [
            (f"{split} {name}", {v: _curve(seeds, split, name) for v, seeds in runs.items()}, variant_looks)
            for split, name in (("train", "loss"), ("validation", metric))
        ]
    drawn = [(t, {k: c for k, c in curves.items() if c is not None}, look) for t, curves, look in panels]
    drawn = [panel for panel in drawn if panel[1]]
    if not drawn:
        raise ValueError(f"no train or validation records with loss or {metric!r}: there is no curve to draw")
    figure, axes = blank_figure(5.4 * len(drawn), 3.4, 1, len(drawn))
    with style():
        for ax, (title, curves, line_looks) in zip(axes[0], drawn, strict=True):
            _draw_curves(ax, curves, line_looks)
            ax.set(title=title, xlabel="step")
            if Metric(title.split()[-1]).percent:
                ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    return figure


def loss_by_place(lines: Mapping[str, Sequence[tuple[int, int, float]]]) -> Figure:
    """Loss over the place in the document, a line for each way of treating the memory: falling, where memory helps.

    Args:
        lines: for each name (first place, last place, mean loss in nats), from the beginning on.
    """
    if not any(lines.values()):
        raise ValueError("loss_by_place needs the losses of at least one place")
    figure, axes = blank_figure(6.6, 3.6, 1, 1)
    ax, line_looks = axes[0][0], looks(lines)
    with style():
        curves = {}
        for name, places in lines.items():
            at = np.array([math.sqrt((first + 1) * (last + 1)) for first, last, _ in places])
            losses = np.array([loss for *_, loss in places])
            curves[name] = _Curve(at, losses, losses, losses)
        ax.set_xscale("log")
        _draw_curves(ax, curves, line_looks)
        ax.set(title="loss by place in the document", xlabel="token of the document", ylabel="loss [nats]")
        ax.xaxis.set_major_formatter(lambda value, _: short_count(value))
    return figure


def accuracy_by_length(lines: Mapping[str, Sequence[tuple[int, float, float, float]]]) -> Figure:
    """Accuracy over the length of documents, a line for each way of treating the memory, with intervals of the rows.

    Args:
        lines: for each name (tokens, accuracy, lower and upper end of its interval), from the shortest on.
    """
    if not any(lines.values()):
        raise ValueError("accuracy_by_length needs the accuracy of at least one length")
    figure, axes = blank_figure(6.6, 3.6, 1, 1)
    ax, line_looks = axes[0][0], looks(lines)
    with style():
        ax.set_xscale("log")
        rows = {name: np.array(points, dtype=float).T for name, points in lines.items()}
        percent = {name: _Curve(at, 100 * mean, 100 * low, 100 * high) for name, (at, mean, low, high) in rows.items()}
        _draw_curves(ax, percent, line_looks)
        ax.set(title="accuracy by length of the document", xlabel="tokens of the document", ylabel="accuracy [%]")
        ax.xaxis.set_major_formatter(lambda value, _: short_count(value))
    return figure


def cost_against_length(
    costs: Mapping[str, tuple[Mapping[int, float], Mapping[int, float]]], reference: str | None = None
) -> Figure:
    """Seconds and peak MiB over the number of tokens, both axes logarithmic: a slope of 2 is quadratic growth.

    Args:
        costs: (seconds by length, MiB by length) of each mechanism.
    """
    if not costs or not all(seconds for seconds, _ in costs.values()):
        raise ValueError("cost_against_length needs at least one mechanism, with at least one length each")
    others = [name for name in costs if name != reference] or list(costs)
    panels = [others[first : first + len(SERIES)] for first in range(0, len(others), len(SERIES))]
    compared = [] if reference is None or reference not in costs or others == [reference] else [reference]
    figure, axes = blank_figure(1.5 + 3.1 * len(panels), 6.4, 2, len(panels))
    lengths = sorted({n for both in costs.values() for n in both[0]})
    labels = ("seconds, forward and backward", "peak MiB")
    with style():
        for index, (row, label) in enumerate(zip(axes, labels, strict=True)):
            heights = [max(height, 1e-9) for both in costs.values() for height in both[index].values()]
            for ax, panel in zip(row, panels, strict=True):
                panel_looks = looks([*compared, *panel], reference)
                for name, look in panel_looks.items():
                    measured = sorted(costs[name][index].items())
                    width = 2.4 if name == reference else 1.3
                    points = [n for n, _ in measured], [max(height, 1e-9) for _, height in measured]
                    ax.plot(*points, color=look.colour, ls=look.dash, marker=look.marker, ms=3, lw=width, label=name)
                ax.set(xscale="log", yscale="log", ylim=(min(heights) / 1.5, max(heights) * 1.5))
                ax.set_xticks(lengths, [f"{n / 1024:g}k" if n % 1024 == 0 else str(n) for n in lengths])
                ax.minorticks_off()
                ax.yaxis.set_major_formatter(lambda height, _: f"{height:g}")
                if index == 0:
                    ax.legend(loc="upper left", frameon=False, fontsize=8)
                else:
                    ax.set_xlabel("tokens")
            row[0].set_ylabel(label)
    return figure


class _Curve(NamedTuple):
    steps: Array
    mean: Array
    low: Array
    high: Array


def _curve(seeds: Sequence[Records], split: str, key: str) -> _Curve | None:
    """Mean, lowest and highest over seeds at the steps that all seeds have; None where no record has the key."""
    values = [
        {r["step"]: float(r[key]) for r in records if r.get("split") == split and _is_number(r.get(key))}
        for records in seeds
    ]
    values = [v for v in values if v]
    steps = sorted(set.intersection(*(set(v) for v in values))) if values else []
    if not steps:
        return None
    table = np.array([[v[step] for step in steps] for v in values])
    bins = np.array_split(np.arange(len(steps)), min(MAX_POINTS, len(steps)))
    table = np.stack([table[:, b].mean(axis=1) for b in bins], axis=1)
    at = np.array([np.mean(np.array(steps)[b]) for b in bins])
    return _Curve(at, table.mean(axis=0), table.min(axis=0), table.max(axis=0))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _draw_curves(ax: Axes, curves: Mapping[str, _Curve], line_looks: Mapping[str, Look]) -> None:
    for name, curve in curves.items():
        look = line_looks[name]
        marker = "o" if len(curve.steps) == 1 else ""  # a line needs two points to be seen
        ax.plot(curve.steps, curve.mean, color=look.colour, ls=look.dash, marker=marker, ms=5)
        ax.fill_between(curve.steps, curve.low, curve.high, color=look.colour, alpha=0.15, lw=0)
    ax.margins(x=0.02)
    low, high = ax.get_ylim()
    ends = [curve.mean[-1] for curve in curves.values()]
    for (name, curve), y in zip(curves.items(), spread(ends, 0.075 * (high - low)), strict=True):
        end = (curve.steps[-1], y)
        label = ax.annotate(name, end, xytext=(6, 0), textcoords="offset points", va="center", fontsize=9)
        label.set_color(line_looks[name].colour)
        label.set_annotation_clip(False)
