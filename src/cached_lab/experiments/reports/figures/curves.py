"""Lines over steps, places, lengths and distances."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..formatting import Metric, short_count
from .style import MUTED, REFERENCE, SERIES, Look, blank_figure, looks, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = npt.NDArray[np.floating[Any]]
Records = Sequence[Mapping[str, Any]]  # the lines of one metrics.jsonl
MAX_POINTS = 120  # a longer curve is averaged in equal bins


class Curve(NamedTuple):
    """A line with its band."""

    steps: Array
    mean: Array
    low: Array
    high: Array


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
        line_looks = {"train": Look(REFERENCE, "-"), "validation": Look(SERIES[0], "-")}
        names = dict.fromkeys(["loss", metric])
        panels = [(name, {split: _curve(seeds, split, name) for split in line_looks}) for name in names]
    else:
        line_looks = looks(runs, reference)
        panels = [
            (f"{split} {name}", {v: _curve(seeds, split, name) for v, seeds in runs.items()})
            for split, name in (("train", "loss"), ("validation", metric))
        ]
    found = [(title, {k: c for k, c in curves.items() if c is not None}) for title, curves in panels]
    found = [panel for panel in found if panel[1]]
    if not found:
        raise ValueError(f"no train or validation records with loss or {metric!r}: there is no curve to draw")
    figure, axes = blank_figure(5.4 * len(found), 3.4, 1, len(found))
    with style():
        for ax, (title, curves) in zip(axes[0], found, strict=True):
            _draw_curves(ax, curves, line_looks)
            ax.set(title=title, xlabel="step")
            if Metric(title.split()[-1]).percent:
                ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    return figure


def loss_by_place(lines: Mapping[str, Sequence[tuple[int, int, float]]]) -> Figure:
    """Loss over the place in the document, a line per treatment of the memory; it falls if memory helps.

    Args:
        lines: for each name (first place, last place, mean loss in nats), from the beginning on.
    """
    curves = {}
    for name, places in lines.items():
        losses = np.array([loss for *_, loss in places])
        at = np.array([math.sqrt((first + 1) * (last + 1)) for first, last, _ in places])
        curves[name] = Curve(at, losses, losses, losses)
    return _logarithmic(curves, "loss by place in the document", "token of the document", "loss [nats]")


def accuracy_by_length(lines: Mapping[str, Sequence[tuple[int, float, float, float]]]) -> Figure:
    """Accuracy over the length of documents, a line per treatment of the memory, with intervals.

    Args:
        lines: for each name (tokens, accuracy, lower and upper end of its interval), from the shortest on.
    """
    rows = {name: np.array(points, dtype=float).T for name, points in lines.items()}
    curves = {name: Curve(at, 100 * mean, 100 * low, 100 * high) for name, (at, mean, low, high) in rows.items()}
    return _logarithmic(curves, "accuracy by length of the document", "tokens of the document", "accuracy [%]")


def answers_by_distance(
    lines: Mapping[str, Mapping[int, Sequence[float]]], chance: float, trained: float, xlabel: str, log: bool = False
) -> Figure:
    """Right answers against the distance from the cue: mean line per memory, band from the worst to the best seed.

    Args:
        lines: for each memory by distance the shares of the seeds; "no memory" is grey, "whole text" wide and pale.
        chance: share of right answers of a guess. trained: farthest distance in training.
    """
    chosen = looks(lines, "no memory")
    figure, axes = blank_figure(8.0, 3.8, 1, 1)
    ax = axes[0][0]
    with style():
        ax.axvline(trained, color=MUTED, ls=":", lw=1)
        ax.axhline(100 * chance, color=MUTED, ls="--", lw=0.8)
        for name, shares in lines.items():
            at, look = sorted(shares), chosen[name]
            values = [[100 * share for share in shares[d]] for d in at]
            line: dict[str, Any] = {"lw": 6, "alpha": 0.35} if name == "whole text" else {"marker": look.marker}
            mean = [float(np.mean(v)) for v in values]
            ax.plot(at, mean, color=look.colour, ls=look.dash, ms=3.5, label=name, **line)
            ax.fill_between(at, list(map(min, values)), list(map(max, values)), color=look.colour, alpha=0.15, lw=0)
        small: dict[str, Any] = {"color": MUTED, "fontsize": 9, "textcoords": "offset points", "annotation_clip": False}
        across, along = ("axes fraction", "data"), ("data", "axes fraction")
        ax.annotate("a guess", (1, 100 * chance), (4, 0), xycoords=across, va="center", **small)
        ax.annotate("farthest in training", (trained, 0.5), (-12, 0), xycoords=along, rotation=90, va="center", **small)
        if log:
            ax.set_xscale("log")
            ax.xaxis.set_major_formatter("{x:,.0f}")
            ax.xaxis.set_minor_formatter("")
        else:
            ax.set_xticks(sorted({d for shares in lines.values() for d in shares}))
        ax.set(xlabel=xlabel, ylabel="right answers [%]", ylim=(0, 103))
        figure.legend(loc="outside right upper", frameon=False, fontsize=9)
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
                for name, look in looks([*compared, *panel], reference).items():
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


def _curve(seeds: Sequence[Records], split: str, key: str) -> Curve | None:
    """Mean, lowest and highest over seeds at their common steps; None if no record has the key."""
    values = []
    for records in seeds:
        finite = [r for r in records if r.get("split") == split and isinstance(r.get(key), int | float)]
        values.append({r["step"]: float(r[key]) for r in finite if math.isfinite(r[key])})
    values = [v for v in values if v]
    steps = sorted(set.intersection(*map(set, values))) if values else []
    if not steps:
        return None
    bins = np.array_split(np.arange(len(steps)), min(MAX_POINTS, len(steps)))
    all_seeds = np.array([[v[step] for step in steps] for v in values])
    binned = np.stack([all_seeds[:, b].mean(axis=1) for b in bins], axis=1)
    at = np.array([np.mean(np.array(steps)[b]) for b in bins])
    return Curve(at, binned.mean(axis=0), binned.min(axis=0), binned.max(axis=0))


def _logarithmic(curves: Mapping[str, Curve], title: str, xlabel: str, ylabel: str) -> Figure:
    figure, axes = blank_figure(6.6, 3.6, 1, 1)
    ax = axes[0][0]
    with style():
        ax.set_xscale("log")
        _draw_curves(ax, curves, looks(curves))
        ax.set(title=title, xlabel=xlabel, ylabel=ylabel)
        ax.xaxis.set_major_formatter(lambda value, _: short_count(value))
    return figure


def _draw_curves(ax: Axes, curves: Mapping[str, Curve], line_looks: Mapping[str, Look]) -> None:
    for name, curve in curves.items():
        look = line_looks[name]
        marker = "o" if len(curve.steps) == 1 else ""  # a line needs two points to be seen
        ax.plot(curve.steps, curve.mean, color=look.colour, ls=look.dash, marker=marker, ms=5, label=name)
        ax.fill_between(curve.steps, curve.low, curve.high, color=look.colour, alpha=0.15, lw=0)
    ax.margins(x=0.02)
    ax.legend(frameon=False, fontsize=9)
