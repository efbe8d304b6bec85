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
from ..formatting import Metric, short_count
from .gates_and_maps import map_grid
from .style import INK, MUTED, SERIES, SURFACE, blank_figure, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORM_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
PLAIN = "plain"


class FormPoint(NamedTuple):
    """One form of a backbone in figure 1: plain, cached, or a control."""

    backbone: str
    form: str
    operations: float
    values: Sequence[float]


class HeadShares(NamedTuple):
    """The gates of one variant in figure 5: sigma(lambda) by run, layer and head, and before training."""

    name: str
    runs: Sequence[Sequence[Sequence[float]]]
    initial: float | None = None


def accuracy_against_flops(points: Sequence[FormPoint], metric: str, cost: str) -> Figure:
    """Figure 1: a colour per backbone, a marker per form, and lines from the plain form to the others.

    Args:
        points: with the values of the seeds; the mark is their mean, the bar its 95 % interval.
        cost: the counted pass, for the axis.
    """
    if not points or not all(p.operations > 0 for p in points):
        raise ValueError("figure 1 needs at least one variant, each with a positive number of operations")
    backbones = list(dict.fromkeys(p.backbone for p in points))
    forms = list(dict.fromkeys(p.form for p in points))
    if len(forms) > len(FORM_MARKERS):
        raise ValueError(f"figure 1 has {len(FORM_MARKERS)} markers, not {len(forms)}; draw fewer variants at a time")
    measure = Metric(metric)
    colours = {name: SERIES[i % len(SERIES)] for i, name in enumerate(backbones)}
    markers = dict(zip(forms, FORM_MARKERS, strict=False))
    figure, axes = blank_figure(7.4, 4.4, 1, 1)
    ax = axes[0][0]
    with style():
        for backbone, colour in colours.items():
            group = [p for p in points if p.backbone == backbone]
            plain = next((p for p in group if p.form == PLAIN), None)
            for p in group:
                mean, low, high = mean_interval(p.values)
                y = measure.scale * mean
                if plain is not None and p is not plain:
                    begin = (plain.operations, measure.scale * mean_interval(plain.values).mean)
                    ax.plot([begin[0], p.operations], [begin[1], y], color=colour, lw=0.8, alpha=0.45, zorder=1)
                if low is not None and high is not None:
                    span = [[y - measure.scale * low], [measure.scale * high - y]]
                    ax.errorbar([p.operations], [y], yerr=span, color=colour, capsize=3, lw=1.2, zorder=2)
                face = SURFACE if p.form == PLAIN else colour
                ax.plot([p.operations], [y], markers[p.form], color=colour, mfc=face, ms=8, mew=1.4, zorder=3)
        costs = [p.operations for p in points]
        if max(costs) > 4 * min(costs):
            ax.set_xscale("log")
            ax.xaxis.set_minor_formatter(lambda value, _: "")
        ax.margins(x=0.16, y=0.1)
        ax.xaxis.set_major_formatter(lambda value, _: short_count(value))
        seeds = sorted({len(p.values) for p in points})
        counted = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        ax.set(xlabel=f"operations, {cost}", ylabel=measure.axis_label)
        ax.set_title(f"{metric} against operations; bars: 95 % intervals over {counted} seeds", pad=12)
        _legend(ax, colours, markers)
    return figure


def _legend(ax: Axes, colours: Mapping[str, str], markers: Mapping[str, str]) -> None:
    def handle(**look: Any) -> Any:
        return ax.plot([], [], linestyle="", ms=8, mew=1.4, **look)[0]

    handles = [handle(marker="o", color=colour, mfc=colour) for colour in colours.values()]
    forms = [handle(marker=m, color=MUTED, mfc=SURFACE if f == PLAIN else MUTED) for f, m in markers.items()]
    options = {"frameon": False, "fontsize": 9, "alignment": "left", "borderaxespad": 0}
    first = ax.legend(handles, list(colours), title="backbone", loc="upper left", bbox_to_anchor=(1.03, 1), **options)
    ax.add_artist(first)
    ax.legend(forms, list(markers), title="form", loc="lower left", bbox_to_anchor=(1.03, 0), **options)


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
        raise ValueError("figure 5 needs the share in 0..1 of at least one head")
    known = [*shares, *(v.initial for v in variants if v.initial is not None)]
    low, high = min(known) - 0.05, max(known) + 0.05
    low, high = max(0.0, min(low, (low + high) / 2 - 0.15)), min(1.0, max(high, (low + high) / 2 + 0.15))
    columns = 2 if len(variants) == 4 else min(3, len(variants))
    rows = -(-len(variants) // columns)
    figure, axes = blank_figure(3.5 * columns + 0.6, 2.9 * rows + 0.3, rows, columns)
    with style():
        for index, ax in enumerate(axes.flat):
            if index >= len(variants):
                ax.set_axis_off()
                continue
            variant, colour = variants[index], SERIES[0]
            depth = max(len(layers) for layers in variant.runs)
            for layers in variant.runs:
                for layer, heads in enumerate(layers, start=1):
                    places = layer + 0.6 * ((np.arange(len(heads)) + 0.5) / len(heads) - 0.5)
                    ax.plot(places, heads, "o", color=MUTED, ms=3.6, mew=0, alpha=0.75, zorder=3)
            means = [[float(np.mean(run[layer])) for run in variant.runs if layer < len(run)] for layer in range(depth)]
            found = [mean_interval(values) for values in means]
            at = range(1, depth + 1)
            ax.plot(at, [f.mean for f in found], color=colour, marker="_", ms=13, mew=2, lw=1.1)
            for x, f in zip(at, found, strict=True):
                if f.low is not None and f.high is not None:
                    ax.plot([x, x], [f.low, f.high], color=colour, lw=3, alpha=0.35, solid_capstyle="butt")
            if variant.initial is not None:
                ax.axhline(variant.initial, color=INK, lw=0.9, ls=(0, (1, 2)))
            runs = f"{len(variant.runs)} run{'s' * (len(variant.runs) > 1)}"
            ticks = [x for x in at if depth <= 12 or x == 1 or x % 4 == 0]
            ax.set(xlim=(0.5, depth + 0.5), ylim=(low, high), xticks=ticks)
            ax.set_title(f"{variant.name}, {runs}", fontsize=10)
            if index % columns == 0:
                ax.set_ylabel("share of the cache, σ(λ)")
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
