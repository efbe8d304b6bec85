"""Figures 1, 4 and 5 of "Cached Transformers" (arXiv:2312.12742).

Figure 1 sets accuracy against operations, figure 4 shows the maps of self-attention and cache on photographs, figure 5
the share of the cache in each head of each layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cached_lab.experiments.statistics import mean_interval

from ..collect import LayerMaps
from ..formatting import Metric, counted, short_count
from .style import MUTED, SERIES, SURFACE, blank_figure, looks, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORM_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
PLAIN = "plain"


class FormPoint(NamedTuple):
    """One form of a backbone in figure 1: plain, cached, or a control; or a variant of a comparison, without a form."""

    backbone: str
    form: str
    operations: float
    values: Sequence[float]


def accuracy_against_flops(points: Sequence[FormPoint], metric: str, cost: str, reference: str | None = None) -> Figure:
    """Figure 1: a colour per backbone, a marker per form, and lines from the plain form to the others.

    Args:
        points: with the values of the seeds; the mark is their mean, the bar its 95 % interval.
        cost: the counted pass, for the axis. reference: a backbone in grey.
    """
    percent = Metric(metric).percent
    scale = 100.0 if percent else 1.0
    markers = dict(zip(dict.fromkeys(p.form for p in points), cycle(FORM_MARKERS), strict=False))
    chosen = looks([p.backbone for p in points], reference)
    figure, ((ax,),) = blank_figure(7.4, 4.4)
    with style():
        for p in points:
            colour, _, marker = chosen[p.backbone]
            mean, low, high = (None if x is None else scale * x for x in mean_interval(p.values))
            for plain in [q for q in points if (q.backbone, q.form) == (p.backbone, PLAIN) and q is not p]:
                begin = scale * float(np.mean(plain.values))
                ax.plot([plain.operations, p.operations], [begin, mean], color=colour, lw=0.8, alpha=0.45)
            if low is not None:
                ax.vlines(p.operations, low, high, color=colour, lw=1.2)
            face = SURFACE if p.form == PLAIN else colour
            ax.plot([p.operations], [mean], markers[p.form] if p.form else marker, color=colour, mfc=face, ms=8)
        costs = [p.operations for p in points]
        if max(costs) > 4 * min(costs):
            ax.set_xscale("log")
            ax.xaxis.set_minor_formatter("")
        ax.xaxis.set_major_formatter(lambda value, _: short_count(value))
        ax.set(xlabel=f"operations, {cost}", ylabel=f"{metric} [%]" if percent else metric)
        ax.set_title(f"{metric} against operations; bars: 95 % intervals over {counted(len(points[0].values), 'seed')}")
        entries = [(name, look.marker, look.colour) for name, look in chosen.items()]
        for name, marker, colour in [*entries, *((form, marker, MUTED) for form, marker in markers.items() if form)]:
            ax.plot([], [], marker, color=colour, label=name)
        ax.legend(loc="upper left", bbox_to_anchor=(1.03, 1))
    return figure


def photograph_maps(images_NHWC: npt.NDArray[Any], layers: Sequence[LayerMaps]) -> Figure:
    """Figure 4: photographs, and beside each the map of self-attention and of the cache in the layers given.

    A cell is a token; it shows the Euclidean norm of the branch's output over heads and channels. Each map has its own
    scale with its ends written below: compare places by colour and strengths by numbers.

    Args:
        images_NHWC: in 0..1, with three channels.
    """
    columns = [("photograph", images_NHWC.clip(0, 1))]
    for layer in layers:
        columns += [
            (f"self, layer {layer.number}", layer.self_attention),
            (f"cache, layer {layer.number}", layer.memory),
        ]
    figure, axes = blank_figure(1.55 * len(columns), 1.78 * len(images_NHWC) + 0.5, len(images_NHWC), len(columns))
    with style():
        for n, row in enumerate(axes):
            for ax, (title, maps) in zip(row, columns, strict=True):
                ax.imshow(maps[n], cmap="cividis", interpolation="nearest")
                ax.set(xticks=[], yticks=[])
                ax.spines[:].set_visible(False)
                if n == 0:
                    ax.set_title(title, fontsize=9)
                if maps is not columns[0][1]:
                    ax.set_xlabel(f"{maps[n].min():.3g} to {maps[n].max():.3g}", fontsize=8)
    return figure


def head_shares(variants: Mapping[str, Sequence[Sequence[Sequence[float]]]]) -> Figure:
    """Figure 5: sigma(lambda) of every head, by layer; a panel for each variant, all on one scale.

    Dots are the heads of all runs, side by side in a layer; the line is the mean over heads and runs, the bar its 95 %
    interval over runs.

    Args:
        variants: the shares by run, layer and head.
    """
    columns = min(3, len(variants))
    rows = -(-len(variants) // columns)
    figure, axes = blank_figure(3.5 * columns + 0.6, 2.9 * rows + 0.3, rows, columns)
    shares = [x for runs in variants.values() for layers in runs for heads in layers for x in heads]
    with style():
        for ax in axes.flat[len(variants) :]:
            ax.set_axis_off()
        for (name, runs), ax in zip(variants.items(), axes.flat, strict=False):
            at = range(1, len(runs[0]) + 1)
            for layers in runs:
                for layer, heads in enumerate(layers, start=1):
                    places = layer + 0.6 * ((np.arange(len(heads)) + 0.5) / len(heads) - 0.5)
                    ax.plot(places, heads, "o", color=MUTED, ms=3.6, mew=0, alpha=0.75)
            found = [mean_interval([float(np.mean(layers[i])) for layers in runs]) for i in range(len(at))]
            ax.plot(at, [f.mean for f in found], "_-", color=SERIES[0], ms=14, mew=2, lw=1)
            for x, f in zip(at, found, strict=True):
                if f.low is not None:
                    ax.plot([x, x], [f.low, f.high], color=SERIES[0], lw=3, alpha=0.35)
            ax.xaxis.get_major_locator().set_params(integer=True)
            ax.set(xlim=(0.5, len(at) + 0.5), ylim=(max(0.0, min(shares) - 0.1), min(1.0, max(shares) + 0.1)))
            ax.set(xlabel="layer", ylabel="share of the memory, σ(λ)")
            ax.set_title(f"{name}, {counted(len(runs), 'run')}", fontsize=10)
    return figure
