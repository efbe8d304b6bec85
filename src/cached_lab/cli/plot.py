"""`cached plot`: draw one figure, or write the reports, of finished runs and comparisons."""

from __future__ import annotations

import argparse
from pathlib import Path

from .arguments import numbers_from_one

KINDS = {
    "curves": "learning curves",
    "fig1": "the paper's figure 1: accuracy against operations, of comparisons and runs",
    "fig4": "the paper's figure 4: maps of self-attention and cache on photographs, of one run",
    "fig5": "the paper's figure 5: share of the cache in every head and layer, of comparisons and runs",
    "report": "write report.html into each folder, and print the tables",
}
ARGUMENTS = (
    ("kind KIND", tuple(KINDS), "; ".join(f"{kind}: {meaning}" for kind, meaning in KINDS.items())),
    ("folders RUN_OR_COMPARE+", Path, "folder of `cached train` or `cached compare`"),
    ("--output FILE", Path, ".png, .svg or .pdf (default: KIND.png in the first folder)"),
    ("--images FILE+", Path, "fig4: photographs (default: test images)"),
    ("--layers 1,4,...", str, "fig4: cached layers (default: first, middle and last)"),
)


def run(arguments: argparse.Namespace) -> int:
    """Draw the figure, and print its path."""
    kind, folders = arguments.kind, arguments.folders
    if kind == "report":
        from cached_lab.experiments.reports.comparison_page import findings, write_compare_report
        from cached_lab.experiments.reports.run_folder import find_comparisons, is_run
        from cached_lab.experiments.reports.run_page import write_run_report
        from cached_lab.experiments.reports.terminal import open_console, show

        console = open_console()
        for folder in folders:
            path = (write_run_report if is_run(folder) else write_compare_report)(folder)
            for comparison in [] if is_run(folder) else find_comparisons(folder):
                show(console, *findings(comparison))
            print(f"\nwritten: {path}")
        return 0
    from cached_lab.experiments import paper_figures
    from cached_lab.experiments.reports.figures.style import save

    output = arguments.output or folders[0] / f"{kind}.png"
    output.parent.mkdir(parents=True, exist_ok=True)
    if kind == "fig4":
        layers = numbers_from_one("--layers", arguments.layers)
        figure = paper_figures.figure_4(folders, output, arguments.images or [], layers)
    else:
        draw = {"curves": paper_figures.curves, "fig1": paper_figures.figure_1, "fig5": paper_figures.figure_5}
        figure = draw[kind](folders, output)
    print(save(figure, output))
    return 0
