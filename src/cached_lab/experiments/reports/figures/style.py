"""Colours, matplotlib settings, and output as a file or as SVG in a page.

Figures use the light colours below. In a page each of them becomes a CSS variable, so that one SVG serves the light and
the dark theme. The hues are Okabe and Ito's, safe for readers with common colour deficiencies.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cached_transformers.extras import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# name: (light, dark)
COLOURS = {
    "ink": ("#24292f", "#e6edf3"),
    "muted": ("#59636e", "#9aa4af"),
    "grid": ("#dfe3e8", "#30363d"),
    "surface": ("#fefefe", "#0f1318"),
    "reference": ("#6b7280", "#a8b0ba"),
    "c1": ("#0072b2", "#56a8e0"),
    "c2": ("#d55e00", "#f0883e"),
    "c3": ("#009e73", "#34c79b"),
    "c4": ("#b0568c", "#e38fc0"),
    "c5": ("#c08a00", "#e8b730"),
    "c6": ("#2f95c8", "#8fd3f7"),
}
INK, MUTED, GRID, SURFACE, REFERENCE = (COLOURS[k][0] for k in ("ink", "muted", "grid", "surface", "reference"))
SERIES = [COLOURS[f"c{i}"][0] for i in range(1, 7)]
DASHES = ["-", (0, (5, 2)), (0, (1, 1.5))]  # for the second and third use of a colour
MARKERS = ["o", "s", "^"]
SUFFIXES = (".png", ".svg", ".pdf")


class Look(NamedTuple):
    """Colour, line style and marker of one variant, the same in every figure of a report."""

    colour: str
    dash: Any
    marker: str = "o"


def looks(names: Iterable[str], reference: str | None = None) -> dict[str, Look]:
    """A look for each variant in order of appearance; the reference is grey."""
    result: dict[str, Look] = {}
    for name in dict.fromkeys(names):
        if name == reference:
            result[name] = Look(REFERENCE, "-")
            continue
        i = len(result) - (reference in result)
        turn = i // len(SERIES) % len(DASHES)
        result[name] = Look(SERIES[i % len(SERIES)], DASHES[turn], MARKERS[turn])
    return result


def style() -> AbstractContextManager[None]:
    """Context with the settings for drawing and saving."""
    matplotlib = require("matplotlib", extra="plot")
    return matplotlib.rc_context(
        {
            "font.size": 10,
            "font.family": "sans-serif",
            "text.color": INK,
            "text.parse_math": False,  # names of users may contain dollar signs
            "axes.edgecolor": MUTED,
            "axes.labelcolor": MUTED,
            "axes.titlecolor": INK,
            "axes.titlesize": 11,
            "axes.titlelocation": "left",
            "axes.titlepad": 10,
            "axes.linewidth": 0.8,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.facecolor": "none",
            "grid.color": GRID,
            "grid.linewidth": 0.8,
            "xtick.color": MUTED,
            "ytick.color": MUTED,
            "xtick.labelsize": 9,
            "ytick.labelsize": 9,
            "figure.facecolor": SURFACE,
            "figure.dpi": 100,
            "savefig.dpi": 200,
            "savefig.facecolor": "auto",
            "lines.linewidth": 1.8,
            "lines.solid_capstyle": "round",
            "svg.fonttype": "none",  # text stays text: searchable, and in the page's own font
            "svg.hashsalt": "cached-transformers",  # the same data give the same file
            "image.composite_image": False,
        }
    )


def blank_figure(
    width: float, height: float, rows: int, columns: int, widths: Sequence[float] | None = None
) -> tuple[Figure, Any]:
    """A figure of `width` x `height` inches, and its axes as an array (rows, columns)."""
    module = require("matplotlib.figure", extra="plot")
    with style():
        figure = module.Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, width_ratios=widths)
    return figure, axes


def check_suffix(option: str, path: Path) -> None:
    """Refuse (ValueError) a file name without one of the three suffixes, before the figure is drawn."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{option} {path} must end in one of {', '.join(SUFFIXES)}")


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure as PNG, SVG or PDF, by the suffix of `path`, and create missing folders."""
    path = Path(path)
    check_suffix("figure", path)
    path.parent.mkdir(parents=True, exist_ok=True)
    dated = {"png": None, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[path.suffix.lower()[1:]]
    with style():
        figure.savefig(path, metadata=dated, bbox_inches="tight")
    return path


def inline_svg(figure: Figure, identifier: str, description: str) -> str:
    """The figure as an `<svg>` element for HTML, with the colours as CSS variables.

    Args:
        identifier: unique in the page; prefixes every id inside the figure.
        description: for screen readers.
    """
    buffer = io.StringIO()
    with style():
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None}, transparent=True)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)  # it would apply to the whole page
    used = {a or b for a, b in re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', svg)}
    # Unused ids are dropped (equal images share one), the others made unique in the page.
    svg = re.sub(r'\sid="([^"]*)"', lambda match: match[0] if match[1] in used else "", svg)
    svg = re.sub(r'(\sid="|url\(#|href="#)', rf"\g<1>{identifier}-", svg)
    for name, (light, _) in COLOURS.items():
        svg = svg.replace(light, f"var(--{name})")
    width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups()  # type: ignore[union-attr]
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" role="img" '
        f'aria-label="{escape(description)}" viewBox="0 0 {width} {height}" '
        f'style="min-width: {float(width) * 0.7:.0f}px; max-width: {float(width) * 1.25:.0f}px">'
    )
    return opening + svg[svg.index(">") + 1 :].strip()
