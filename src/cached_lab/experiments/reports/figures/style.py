"""Colours, matplotlib settings, and output. The hues are Okabe and Ito's, safe for common colour deficiencies."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cached_transformers.extras import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED, GRID, SURFACE, REFERENCE = "#24292f", "#59636e", "#dfe3e8", "#fefefe", "#6b7280"
SERIES = ["#0072b2", "#d55e00", "#009e73", "#b0568c", "#c08a00", "#2f95c8"]
DASHES = ["-", (0, (5, 2)), (0, (1, 1.5))]  # for the second and third use of a colour
MARKERS = ["o", "s", "^"]


class Look(NamedTuple):
    """Colour, line style and marker of one variant, the same in every figure of a report."""

    colour: str
    dash: Any
    marker: str = "o"


def looks(names: Iterable[str], reference: str | None = None) -> dict[str, Look]:
    """A look for each variant in order of appearance; the reference is grey."""
    result: dict[str, Look] = {}
    for name in dict.fromkeys(names):
        turn, hue = divmod(len(result) - (reference in result), len(SERIES))
        turn %= len(DASHES)
        result[name] = Look(REFERENCE, "-") if name == reference else Look(SERIES[hue], DASHES[turn], MARKERS[turn])
    return result


def style() -> AbstractContextManager[None]:
    """Context with the settings for drawing and saving."""
    settings: dict[str, Any] = {
        **dict.fromkeys(["axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"], MUTED),
        "text.parse_math": False,  # names of users may contain dollar signs
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": GRID,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "figure.facecolor": SURFACE,
        "savefig.dpi": 200,
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "cached-transformers",  # the same data give the same file
        "image.composite_image": False,
    }
    context: AbstractContextManager[None] = require("matplotlib", extra="plot").rc_context(settings)
    return context


def blank_figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, Any]:
    """A figure of `width` x `height` inches, and its axes as an array (rows, columns)."""
    module = require("matplotlib.figure", extra="plot")
    with style():
        figure = module.Figure(figsize=(width, height), layout="constrained")
        return figure, figure.subplots(rows, columns, squeeze=False)


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG, SVG or PDF, by the suffix of `path`."""
    dated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix)
    path.parent.mkdir(parents=True, exist_ok=True)
    with style():
        figure.savefig(path, metadata=dated, bbox_inches="tight")
    return path


def as_svg(figure: Figure) -> str:
    """The figure as an `<svg>` element for HTML; its ids are hashes of their content."""
    buffer = io.StringIO()
    with style():
        unnamed = dict.fromkeys(["Creator", "Date", "Format", "Type"])
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata=unnamed)
    svg = buffer.getvalue()
    return re.sub(r' id="[A-Za-z0-9]+_\d+"', "", svg[svg.index("<svg") :])
