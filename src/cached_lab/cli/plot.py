"""`cached plot`: one figure, or the reports, of finished runs and comparisons."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .arguments import add_command, numbers_from_one

KINDS = {
    "curves": "learning curves",
    "gates": "memory share of every head and layer",
    "maps": "feature maps of self-attention and memory, of one run",
    "flops": "metric against operations, of comparisons",
    "fig1": "the paper's figure 1: accuracy against operations, with intervals over seeds, of comparisons and runs",
    "fig4": "the paper's figure 4: maps of self-attention and cache on photographs, of one run",
    "fig5": "the paper's figure 5: share of the cache in every head and layer, of comparisons and runs",
    "report": "write report.html into each folder, and print the tables",
}


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = add_command(
        subparsers,
        "plot",
        run,
        "draw curves, gates, feature maps or cost of runs and comparisons; write reports",
        description="Draws one figure, or writes the reports, of folders of `cached train` or `cached compare`.",
        epilog="example: cached plot curves runs/digits_plain runs/digits_grc --output curves.svg",
    )
    parser.add_argument("kind", choices=list(KINDS), help="; ".join(f"{k}: {v}" for k, v in KINDS.items()))
    folders = "folder of a run or a comparison"
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_OR_COMPARE", help=folders)
    output = ".png, .svg or .pdf (default: KIND.png in the first folder)"
    parser.add_argument("--output", type=Path, metavar="FILE", help=output)
    images = "fig4: photographs (default: test images)"
    parser.add_argument("--images", nargs="+", type=Path, default=[], metavar="FILE", help=images)
    parser.add_argument("--layers", metavar="1,4,...", help="fig4: cached layers (default: first, middle and last)")


def run(arguments: argparse.Namespace) -> int:
    """Draw the figure, and print its path."""
    kind, folders = arguments.kind, arguments.folders
    if kind != "fig4" and (arguments.images or arguments.layers):
        raise ValueError(f"--images and --layers are of fig4; drop them for {kind}")
    if kind == "report":
        return _write_reports(arguments)
    from cached_lab.experiments import paper_figures
    from cached_lab.experiments.reports import draw
    from cached_lab.experiments.reports.figures.style import check_suffix, save

    output = arguments.output or folders[0] / f"{kind}.png"
    check_suffix("--output", output)
    output.parent.mkdir(parents=True, exist_ok=True)
    if kind == "fig4":
        layers = None if arguments.layers is None else numbers_from_one("--layers", arguments.layers, "1,4")
        figure = paper_figures.figure_4(folders, output, arguments.images, layers)
    elif kind in ("fig1", "fig5"):
        figure = {"fig1": paper_figures.figure_1, "fig5": paper_figures.figure_5}[kind](folders, output)
    else:
        figure = {"curves": draw.curves, "gates": draw.gates, "maps": draw.maps, "flops": draw.flops}[kind](folders)
    print(save(figure, output))
    if kind.startswith("fig"):  # the numbers of a paper's figure are in a file beside it
        print(output.with_suffix(".json" if kind == "fig4" else ".csv"))
    return 0


def _write_reports(arguments: argparse.Namespace) -> int:
    from cached_lab.experiments.reports.comparison_page import print_comparison, write_compare_report
    from cached_lab.experiments.reports.run_folder import find_comparisons, is_run
    from cached_lab.experiments.reports.run_page import write_run_report
    from cached_lab.experiments.reports.terminal import open_console

    if arguments.output is not None:
        raise ValueError(f"--output {arguments.output} does not apply: each report is written into its own folder")
    console = open_console()
    for folder in arguments.folders:
        path = (write_run_report if is_run(folder) else write_compare_report)(folder)
        for comparison in [] if is_run(folder) else find_comparisons(folder):
            print_comparison(comparison, console)
        print(f"\nwritten: {path}")
    return 0
