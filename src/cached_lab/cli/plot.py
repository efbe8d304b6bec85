"""`cached plot`: one figure, or the report, of runs and comparisons that exist already."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .arguments import numbers_from_one

KINDS = {
    "curves": "learning curves",
    "gates": "memory share of every head and layer",
    "maps": "feature maps of self-attention and memory, of one run",
    "flops": "metric against operations, of comparisons",
    "fig1": "the paper's figure 1: accuracy against operations, with intervals over seeds, of comparisons and runs",
    "fig4": "the paper's figure 4: what self-attention and cache see in photographs, of one run",
    "fig5": "the paper's figure 5: share of the cache in every head and layer, of comparisons and runs",
    "report": "write report.html into each folder, and print the tables",
}


def add_parser(subparsers: Any) -> None:
    """Declare the arguments."""
    parser = subparsers.add_parser(
        "plot",
        help="draw curves, gates, feature maps or cost of runs and comparisons; write reports",
        description="Draws one figure, or writes the report, of folders that `cached train` or `cached compare` made.",
        epilog="example: cached plot curves runs/digits_plain runs/digits_grc --output curves.svg",
    )
    parser.add_argument("kind", choices=list(KINDS), help="; ".join(f"{k}: {v}" for k, v in KINDS.items()))
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="RUN_OR_COMPARE", help="folder of a run or a comparison"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help=".png, .svg or .pdf (default: KIND.png in the first folder)"
    )
    parser.add_argument(
        "--images", nargs="+", type=Path, default=[], metavar="FILE", help="fig4: photographs (default: test images)"
    )
    parser.add_argument("--layers", metavar="1,4,...", help="fig4: cached layers (default: first, middle and last)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Draw what was asked for, and print where it is."""
    if arguments.kind != "fig4" and (arguments.images or arguments.layers):
        raise ValueError(f"--images and --layers are of fig4; drop them for {arguments.kind}")
    if arguments.kind == "report":
        return _write_reports(arguments)
    from cached_lab.experiments.reports import draw
    from cached_lab.experiments.reports.figures.style import SUFFIXES, save

    output = arguments.output or arguments.folders[0] / f"{arguments.kind}.png"
    if output.suffix.lower() not in SUFFIXES:  # before the work, not after it
        raise ValueError(f"--output {output} must end in one of {', '.join(SUFFIXES)}")
    if arguments.kind.startswith("fig"):
        return _paper_figure(arguments, output)
    drawn = {"curves": draw.curves, "gates": draw.gates, "maps": draw.maps, "flops": draw.flops}[arguments.kind]
    print(save(drawn(arguments.folders), output))
    return 0


def _paper_figure(arguments: argparse.Namespace, output: Path) -> int:
    """Draw one of the paper's figures; its numbers go into a file of the same name beside it."""
    from cached_lab.experiments import paper_figures
    from cached_lab.experiments.reports.figures.style import save

    output.parent.mkdir(parents=True, exist_ok=True)
    if arguments.kind == "fig4":
        layers = None if arguments.layers is None else numbers_from_one("--layers", arguments.layers, "1,4")
        figure = paper_figures.figure_4(arguments.folders, output, arguments.images, layers)
    else:
        drawn = {"fig1": paper_figures.figure_1, "fig5": paper_figures.figure_5}[arguments.kind]
        figure = drawn(arguments.folders, output)
    print(save(figure, output))
    print(output.with_suffix(".json" if arguments.kind == "fig4" else ".csv"))
    return 0


def _write_reports(arguments: argparse.Namespace) -> int:
    from cached_lab.experiments.reports.comparison_page import print_cache_use, print_statistics, write_compare_report
    from cached_lab.experiments.reports.formatting import Metric
    from cached_lab.experiments.reports.run_folder import find_comparisons, is_run
    from cached_lab.experiments.reports.run_page import write_run_report
    from cached_lab.experiments.reports.terminal import open_console

    if arguments.output is not None:
        raise ValueError(f"--output {arguments.output} does not apply: each report is written into its own folder")
    console = open_console()
    for folder in arguments.folders:
        if is_run(folder):
            path = write_run_report(folder)
        else:
            path = write_compare_report(folder)
            for comparison in find_comparisons(folder):
                print(f"\n{comparison.title}")
                by_rows = {v["name"]: tuple(v["rows_interval"]) for v in comparison.variants if v.get("rows_interval")}
                print_statistics(
                    comparison.statistics,
                    comparison.metric,
                    comparison.split,
                    comparison.reference,
                    console,
                    pairs=comparison.pairs,
                    rows_intervals=by_rows,
                    baselines=comparison.baselines,
                )
                if comparison.cache_use:
                    print_cache_use(comparison.cache_use, Metric(comparison.metric), comparison.split, console)
        print(f"\nwritten: {path}")
    return 0
