"""Figures from plain data: learning curves, gates, feature maps, accuracy against cost, differences to a reference.

Every function takes numbers and names, returns a matplotlib `Figure`, and touches neither pyplot nor any global state.
Figures 1, 4 and 5 of "Cached Transformers" (arXiv:2312.12742) have their counterparts in `metric_against_flops`,
`feature_maps` and `gates`.

Shapes: N images, H W their pixels, C colours, L layers, h w the tokens' grid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cached_transformers.extras import require

from .style import INK, MUTED, REFERENCE, SERIES, SURFACE, Look, looks, style
from .wording import Metric, short_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = npt.NDArray[np.floating[Any]]
Records = Sequence[Mapping[str, Any]]  # the lines of one metrics.jsonl
MAX_POINTS = 120  # a longer curve is averaged in equal bins: what a line of this width can show
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


def learning_curves(
    runs: Mapping[str, Sequence[Records]], metric: str = "accuracy", reference: str | None = None
) -> Figure:
    """Loss and metric over training steps: mean line per variant, band from the lowest to the highest seed.

    One variant shows training and validation in each panel; several show training loss beside validation metric.

    Args:
        runs: the records of each seed, by variant.

    Raises:
        ValueError: no curve can be drawn from the records.
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


def gates(layers_by_variant: Mapping[str, Sequence[Sequence[Sequence[float]]]], reference: str | None = None) -> Figure:
    """Memory share sigma(lambda): heat map of layers and heads (first seed), mean per layer (a line per seed).

    Args:
        layers_by_variant: for each variant, for each seed, for each layer the shares of its heads, in 0..1. Layers may
            differ in their number of heads. Heads have no fixed order over seeds, so only means are compared.

    Raises:
        ValueError: nothing to draw, or a share outside 0..1.
    """
    shares = [x for seeds in layers_by_variant.values() for layers in seeds for heads in layers for x in heads]
    if not shares or not all(0 <= x <= 1 for x in shares):
        raise ValueError("gates must hold one share in 0..1 per head for at least one layer")
    colours = require("matplotlib.colors", extra="plot")
    ramp = colours.LinearSegmentedColormap.from_list("memory share", ["#eef3f7", "#56a3cf", "#0b3d63"])
    rows, most_layers = len(layers_by_variant), max(len(seeds[0]) for seeds in layers_by_variant.values())
    figure, axes = blank_figure(7.6, rows * (1.1 + 0.42 * most_layers), rows, 2, widths=[1.25, 1])
    with style():
        for (name, seeds), row in zip(layers_by_variant.items(), axes, strict=True):
            _draw_gate_map(row[0], seeds[0], ramp)
            row[0].set(title=f"{name}: memory share by head", xlabel="head", ylabel="layer")
            colour = looks(layers_by_variant, reference)[name].colour
            for layers in seeds:
                row[1].plot([np.mean(h) for h in layers], range(len(layers)), color=colour, marker="o", ms=4, lw=1.4)
            row[1].axvline(0.5, color=MUTED, lw=0.8, ls=(0, (4, 3)))
            row[1].set(title=f"mean by layer, {_counted(len(seeds), 'seed')}", xlabel="0 self, 1 memory", xlim=(0, 1))
            row[1].set(ylim=row[0].get_ylim(), yticks=row[0].get_yticks())
            row[1].set_yticklabels([t.get_text() for t in row[0].get_yticklabels()])
    return figure


def feature_maps(image: Array, self_maps: Array, memory_maps: Array, images: int = 4, layers: int = 3) -> Figure:
    """Input, self-attention and memory outputs side by side: rows are images, columns layers from early to late.

    Each map has its own scale from its least to its greatest value: places can be compared, strengths cannot.

    Args:
        image: (N, H, W, C) in 0..1, C 1 or 3.
        self_maps, memory_maps: (L, N, h, w).
        images, layers: how many to show at most.

    Raises:
        ValueError: the shapes do not fit each other.
    """
    pictures = image.ndim == 4 and image.shape[-1] in (1, 3) and len(image) > 0
    maps_fit = self_maps.ndim == 4 and self_maps.shape == memory_maps.shape and len(self_maps) > 0
    if not (pictures and maps_fit and self_maps.shape[1] == len(image)):
        raise ValueError(
            f"feature maps need image (N, H, W, 1 or 3) and two arrays (L, N, h, w); got {image.shape}, "
            f"{self_maps.shape} and {memory_maps.shape}"
        )
    shown = np.unique(np.linspace(0, len(self_maps) - 1, min(layers, len(self_maps))).round().astype(int))
    rows = min(images, len(image))
    figure, axes = blank_figure(1.25 * (1 + 2 * len(shown)), 1.3 * rows + 0.3, rows, 1 + 2 * len(shown))
    with style():
        for n, row in enumerate(axes):
            picture = np.clip(image[n], 0, 1)
            row[0].imshow(picture[..., 0] if picture.shape[-1] == 1 else picture, cmap="gray", vmin=0, vmax=1)
            maps = [(kind, layer, data[layer, n]) for layer in shown for kind, data in _both(self_maps, memory_maps)]
            for ax, (_, _, data) in zip(row[1:], maps, strict=True):
                ax.imshow(data, cmap="cividis")
            for ax in row:
                ax.set(xticks=[], yticks=[])
                ax.grid(False)
                ax.spines[:].set_visible(False)
        titles = ["input", *(f"{kind}, layer {layer}" for layer in shown + 1 for kind in ("self", "memory"))]
        for ax, title in zip(axes[0], titles, strict=True):
            ax.set_title(title, fontsize=9, loc="center", pad=6)
    return figure


def metric_against_flops(points: Sequence[Point], metric: str = "accuracy", reference: str | None = None) -> Figure:
    """Metric over operations per forward pass, with intervals: the upper left is better (lower left for a loss).

    Raises:
        ValueError: no points, or operations that are not positive.
    """
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

    Raises:
        ValueError: no rows.
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


def loss_by_place(lines: Mapping[str, Sequence[tuple[int, int, float]]]) -> Figure:
    """Loss over the place in the document, a line for each way of treating the memory: falling, where memory helps.

    Args:
        lines: for each name (first place, last place, mean loss in nats), from the beginning on.

    Raises:
        ValueError: there is nothing to draw.
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


def cost_against_length(
    costs: Mapping[str, tuple[Mapping[int, float], Mapping[int, float]]], reference: str | None = None
) -> Figure:
    """Seconds and peak MiB over the number of tokens, both axes logarithmic: a slope of 2 is quadratic growth.

    Args:
        costs: (seconds by length, MiB by length) of each mechanism.

    Raises:
        ValueError: nothing was measured.
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
                    own = sorted(costs[name][index].items())
                    width = 2.4 if name == reference else 1.3
                    points = [n for n, _ in own], [max(height, 1e-9) for _, height in own]
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


def blank_figure(
    width: float, height: float, rows: int, columns: int, widths: Sequence[float] | None = None
) -> tuple[Figure, Any]:
    """A figure of `width` x `height` inches, its settings ours, and its axes as an array (rows, columns)."""
    module = require("matplotlib.figure", extra="plot")
    with style():
        figure = module.Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, width_ratios=widths)
    return figure, axes


def _draw_curves(ax: Axes, curves: Mapping[str, _Curve], line_looks: Mapping[str, Look]) -> None:
    for name, curve in curves.items():
        look = line_looks[name]
        marker = "o" if len(curve.steps) == 1 else ""  # a line needs two points to be seen
        ax.plot(curve.steps, curve.mean, color=look.colour, ls=look.dash, marker=marker, ms=5)
        ax.fill_between(curve.steps, curve.low, curve.high, color=look.colour, alpha=0.15, lw=0)
    ax.margins(x=0.02)
    low, high = ax.get_ylim()
    ends = [curve.mean[-1] for curve in curves.values()]
    for (name, curve), y in zip(curves.items(), _spread(ends, 0.075 * (high - low)), strict=True):
        end = (curve.steps[-1], y)
        label = ax.annotate(name, end, xytext=(6, 0), textcoords="offset points", va="center", fontsize=9)
        label.set_color(line_looks[name].colour)
        label.set_annotation_clip(False)


def _spread(values: Sequence[float], gap: float) -> list[float]:
    """Move labels apart until neighbours are `gap` away, as little as that takes and without changing their order."""
    order = np.argsort(values)
    placed = np.asarray(values, dtype=float)[order]
    for _ in range(200):
        overlap = gap - np.diff(placed)
        if len(placed) < 2 or overlap.max() <= 1e-9 * abs(gap):
            break
        push = np.clip(overlap, 0, None) / 2
        placed[:-1] -= push
        placed[1:] += push
    result = np.empty_like(placed)
    result[order] = placed
    return [float(v) for v in result]


def _draw_gate_map(ax: Axes, layers: Sequence[Sequence[float]], ramp: Any) -> None:
    table = np.full((len(layers), max(len(heads) for heads in layers)), np.nan)
    for i, heads in enumerate(layers):
        table[i, : len(heads)] = heads
    ax.imshow(np.ma.masked_invalid(table), cmap=ramp, vmin=0, vmax=1, aspect="auto")
    if table.shape[1] <= 12:
        for (i, j), share in np.ndenumerate(table):
            if not math.isnan(share):
                ink = "#ffffff" if share > 0.55 else "#111111"
                ax.text(j, i, f"{share:.2f}", ha="center", va="center", fontsize=8, color=ink)
    ax.set(xticks=range(table.shape[1]), yticks=range(table.shape[0]))
    ax.set_xticklabels([str(j + 1) for j in range(table.shape[1])])
    ax.set_yticklabels([str(i + 1) for i in range(table.shape[0])])
    ax.tick_params(length=0)
    ax.grid(False)
    ax.spines[:].set_visible(False)


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
            heights = _spread([measure.scale * p.mean for p in group], 0.065 * (high - low))
            for p, y in zip(group, heights, strict=True):
                label = ax.annotate(p.name, (p.flops, y), xytext=(9 * side, 0), textcoords="offset points", fontsize=9)
                label.set(color=variant_looks[p.name].colour, va="center", ha="left" if side > 0 else "right")


def _both(self_maps: Array, memory_maps: Array) -> tuple[tuple[str, Array], tuple[str, Array]]:
    return ("self", self_maps), ("memory", memory_maps)


def _counted(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"
