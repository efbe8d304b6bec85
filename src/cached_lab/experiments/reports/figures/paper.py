"""Figures 1, 4 and 5 of "Cached Transformers" (arXiv:2312.12742), and their data as files.

Figure 1 sets accuracy against operations, figure 4 shows the maps of self-attention and cache on photographs, figure 5
the share of the cache in each head of each layer.
Shapes: N images, H W their pixels, h w the map of a layer.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cached_lab.experiments.statistics import mean_interval

from ..collect import LayerMaps
from ..formatting import Metric, counted, short_count
from .maps import map_grid
from .style import INK, MUTED, SERIES, SURFACE, blank_figure, looks, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORM_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
PLAIN = "plain"


class FormPoint(NamedTuple):
    """One form of a backbone in figure 1: plain, cached, or a control; or a variant of a comparison, without a form."""

    backbone: str
    form: str
    operations: float
    values: Sequence[float]


class HeadShares(NamedTuple):
    """The gates of one variant in figure 5: sigma(lambda) by run, layer and head, and before training."""

    name: str
    runs: Sequence[Sequence[Sequence[float]]]
    initial: float | None = None


def accuracy_against_flops(points: Sequence[FormPoint], metric: str, cost: str, reference: str | None = None) -> Figure:
    """Figure 1: a colour per backbone, a marker per form, and lines from the plain form to the others.

    Args:
        points: with the values of the seeds; the mark is their mean, the bar its 95 % interval.
        cost: the counted pass, for the axis. reference: a backbone in grey.
    """
    if not points or not all(p.operations > 0 for p in points):
        raise ValueError("accuracy against operations needs variants, each with a positive number of operations")
    forms = list(dict.fromkeys(p.form for p in points))
    if len(forms) > len(FORM_MARKERS):
        raise ValueError(f"figure 1 has {len(FORM_MARKERS)} markers, not {len(forms)}; draw fewer variants at a time")
    measure, markers = Metric(metric), dict(zip(forms, FORM_MARKERS, strict=False))
    chosen = looks([p.backbone for p in points], reference)
    figure, axes = blank_figure(7.4, 4.4, 1, 1)
    ax = axes[0][0]
    with style():
        for p in points:
            colour, _, marker = chosen[p.backbone]
            mean, low, high = mean_interval(p.values)
            y = measure.scale * mean
            for plain in [q for q in points if (q.backbone, q.form) == (p.backbone, PLAIN) and q is not p]:
                begin = measure.scale * mean_interval(plain.values).mean
                ax.plot([plain.operations, p.operations], [begin, y], color=colour, lw=0.8, alpha=0.45, zorder=1)
            if low is not None and high is not None:
                span = [[y - measure.scale * low], [measure.scale * high - y]]
                ax.errorbar([p.operations], [y], yerr=span, color=colour, capsize=3, lw=1.2, zorder=2)
            face, marker = SURFACE if p.form == PLAIN else colour, markers[p.form] if p.form else marker
            ax.plot([p.operations], [y], marker, color=colour, mfc=face, ms=8, mew=1.4, zorder=3)
        costs = [p.operations for p in points]
        if max(costs) > 4 * min(costs):
            ax.set_xscale("log")
            ax.xaxis.set_minor_formatter(lambda value, _: "")
        ax.margins(x=0.16, y=0.1)
        ax.xaxis.set_major_formatter(lambda value, _: short_count(value))
        seeds = sorted({len(p.values) for p in points})
        number = counted(seeds[0], "seed") if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
        ax.set(xlabel=f"operations, {cost}", ylabel=measure.axis_label)
        ax.set_title(f"{metric} against operations; bars: 95 % intervals over {number}", pad=12)
        first = _legend(ax, {name: {"marker": look.marker, "color": look.colour} for name, look in chosen.items()}, 1)
        if any(forms):
            faces = {form: SURFACE if form == PLAIN else MUTED for form in forms}
            _legend(ax, {f: {"marker": markers[f], "color": MUTED, "mfc": faces[f]} for f in forms}, 0, "form")
            ax.add_artist(first)
    return figure


def _legend(ax: Axes, entries: Mapping[str, Mapping[str, Any]], y: int, title: str | None = None) -> Any:
    """A legend beside the axes, at the bottom (0) or the top (1)."""
    handles = [ax.plot([], [], linestyle="", ms=8, mew=1.4, **look)[0] for look in entries.values()]
    place = {"loc": "upper left" if y else "lower left", "bbox_to_anchor": (1.03, y), "borderaxespad": 0}
    return ax.legend(handles, list(entries), title=title, frameon=False, fontsize=9, alignment="left", **place)


def photograph_maps(images: npt.NDArray[Any], layers: Sequence[LayerMaps]) -> Figure:
    """Figure 4: photographs, and beside each the map of self-attention and of the cache in the layers given.

    A cell is a token; it shows the Euclidean norm of the branch's output over heads and channels. Each map has its own
    scale with its ends written below: compare places by colour and strengths by numbers.

    Args:
        images: (N, H, W, 3) in 0..1.
    """
    if not len(images) or not layers or any(len(layer.self_attention) != len(images) for layer in layers):
        raise ValueError(f"figure 4 needs images, and layers with a map of each of the {len(images)}")
    kinds = (("self", "self_attention"), ("cache", "memory"))
    maps = [(f"{kind}, layer {layer.number}", getattr(layer, name)) for layer in layers for kind, name in kinds]
    return map_grid(images, maps, "photograph", (1.55, 1.78, 0.5), ends=True)


def head_shares(variants: Sequence[HeadShares]) -> Figure:
    """Figure 5: sigma(lambda) of every head, by layer; a panel for each variant.

    Dots are the heads of all runs, side by side in a layer; the line is the mean over heads and runs, the bar its 95 %
    interval over runs; the dotted line is the value before training. All panels share one scale.
    """
    shares = [x for v in variants for layers in v.runs for heads in layers for x in heads]
    if not shares or not all(0 <= x <= 1 for x in shares):
        raise ValueError("a figure of gates needs the share in 0..1 of at least one head")
    known = [*shares, *(v.initial for v in variants if v.initial is not None)]
    low, high = min(known) - 0.05, max(known) + 0.05
    low, high = max(0.0, min(low, (low + high) / 2 - 0.15)), min(1.0, max(high, (low + high) / 2 + 0.15))
    columns = 2 if len(variants) == 4 else min(3, len(variants))
    rows = -(-len(variants) // columns)
    figure, axes = blank_figure(3.5 * columns + 0.6, 2.9 * rows + 0.3, rows, columns)
    with style():
        for ax in axes.flat[len(variants) :]:
            ax.set_axis_off()
        for index, (variant, ax) in enumerate(zip(variants, axes.flat, strict=False)):
            depth = max(len(layers) for layers in variant.runs)
            at = range(1, depth + 1)
            for layers in variant.runs:
                for layer, heads in enumerate(layers, start=1):
                    places = layer + 0.6 * ((np.arange(len(heads)) + 0.5) / len(heads) - 0.5)
                    ax.plot(places, heads, "o", color=MUTED, ms=3.6, mew=0, alpha=0.75, zorder=3)
            means = [[float(np.mean(run[layer])) for run in variant.runs if layer < len(run)] for layer in range(depth)]
            found = [mean_interval(values) for values in means]
            ax.plot(at, [f.mean for f in found], color=SERIES[0], marker="_", ms=13, mew=2, lw=1.1)
            for x, f in zip(at, found, strict=True):
                if f.low is not None and f.high is not None:
                    ax.plot([x, x], [f.low, f.high], color=SERIES[0], lw=3, alpha=0.35, solid_capstyle="butt")
            if variant.initial is not None:
                ax.axhline(variant.initial, color=INK, lw=0.9, ls=(0, (1, 2)))
            ticks = [x for x in at if depth <= 12 or x == 1 or x % 4 == 0]
            ax.set(xlim=(0.5, depth + 0.5), ylim=(low, high), xticks=ticks)
            ax.set_title(f"{variant.name}, {len(variant.runs)} run{'s' * (len(variant.runs) > 1)}", fontsize=10)
            if index % columns == 0:
                ax.set_ylabel("share of the memory, σ(λ)")
            if index >= len(variants) - columns:
                ax.set_xlabel("layer")
    return figure


def write_table(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Path:
    """Write the numbers of a figure as CSV; returns the path."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
    return path


def write_maps(path: Path, names: Sequence[str], layers: Sequence[LayerMaps]) -> Path:
    """Write the maps of figure 4 as JSON: for each image and layer the norms of self-attention and cache."""
    content = [
        {"image": name, "layer": layer.number, "module": layer.name}
        | {
            kind: np.round(data[n], 6).tolist()
            for kind, data in (("self", layer.self_attention), ("cache", layer.memory))
        }
        for n, name in enumerate(names)
        for layer in layers
    ]
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return path
