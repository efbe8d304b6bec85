"""`cached plot`: one figure, or the report, of runs and comparisons that exist already."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from cached_transformers.experiments.cache_use.variants import print_cache_use
from cached_transformers.experiments.reports.run_folder import (
    Comparison,
    Run,
    find_comparisons,
    is_comparison,
    is_run,
    read_comparison,
    read_run,
)
from cached_transformers.experiments.reports.wording import Metric

from .tables import print_statistics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add `plot` to the commands."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
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
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Draw what was asked for, print where it is, and return 0.

    Raises:
        ValueError: a folder is neither run nor comparison, it lacks what the figure shows, or a wrong suffix.
        ImportError: matplotlib is not installed.
    """
    if arguments.kind != "fig4" and (arguments.images or arguments.layers):
        raise ValueError(f"--images and --layers are of fig4; drop them for {arguments.kind}")
    if arguments.kind == "report":
        return _write_reports(arguments)
    from cached_transformers.experiments.reports.figures.style import SUFFIXES, save

    output = arguments.output or arguments.folders[0] / f"{arguments.kind}.png"
    if output.suffix.lower() not in SUFFIXES:  # before the work, not after it
        raise ValueError(f"--output {output} must end in one of {', '.join(SUFFIXES)}")
    if arguments.kind.startswith("fig"):
        return _paper_figure(arguments, output)
    draw: Callable[[list[Path]], Figure] = {"curves": _curves, "gates": _gates, "maps": _maps, "flops": _flops}[
        arguments.kind
    ]
    print(save(draw(arguments.folders), output))
    return 0


def _paper_figure(arguments: argparse.Namespace, output: Path) -> int:
    """Draw one of the paper's figures; its numbers go into a file of the same name beside it."""
    from cached_transformers.experiments.reports.figures.style import save

    from . import paper_figures

    output.parent.mkdir(parents=True, exist_ok=True)
    if arguments.kind == "fig4":
        layers = None if arguments.layers is None else paper_figures.parse_layers(arguments.layers)
        figure = paper_figures.figure_4(arguments.folders, output, arguments.images, layers)
    else:
        draw = {"fig1": paper_figures.figure_1, "fig5": paper_figures.figure_5}[arguments.kind]
        figure = draw(arguments.folders, output)
    print(save(figure, output))
    print(output.with_suffix(".json" if arguments.kind == "fig4" else ".csv"))
    return 0


def _write_reports(arguments: argparse.Namespace) -> int:
    from cached_transformers.experiments.reports.comparison_page import write_compare_report
    from cached_transformers.experiments.reports.run_page import write_run_report

    if arguments.output is not None:
        raise ValueError(f"--output {arguments.output} does not apply: each report is written into its own folder")
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
                    Console(),
                    pairs=comparison.pairs,
                    rows_intervals=by_rows,
                    baselines=comparison.baselines,
                )
                if comparison.cache_use:
                    print_cache_use(comparison.cache_use, Metric(comparison.metric), comparison.split, Console())
        print(f"\nwritten: {path}")
    return 0


def _curves(folders: list[Path]) -> Figure:
    from cached_transformers.experiments.reports.figures.curves import learning_curves

    runs, comparisons = _read(folders)
    records = {name: [run.records for run in group] for name, group in runs.items()}
    first = comparisons[0] if comparisons else None
    return learning_curves(records, first.metric if first else "accuracy", _reference(comparisons))


def _gates(folders: list[Path]) -> Figure:
    from cached_transformers.experiments.reports.figures.gates_and_maps import gates

    runs, comparisons = _read(folders)
    layers = {name: [run.gates for run in group if run.gates] for name, group in runs.items()}
    layers = {name: group for name, group in layers.items() if group}
    if not layers:
        raise ValueError(f"no gates.json in {_listed(folders)}: only models with a gated memory have gates")
    return gates(layers, _reference(comparisons))


def _maps(folders: list[Path]) -> Figure:
    from cached_transformers.experiments.reports.figures.gates_and_maps import feature_maps

    if len(folders) != 1 or not is_run(folders[0]):
        raise ValueError(f"`cached plot maps` draws one run; {_listed(folders)} is not the folder of one run")
    maps = read_run(folders[0]).feature_maps()
    if maps is None:
        raise ValueError(f"no feature_maps.npz in {folders[0]}: only image models with a memory have feature maps")
    return feature_maps(maps["image"], maps["self"], maps["memory"])


def _flops(folders: list[Path]) -> Figure:
    from cached_transformers.experiments.reports.figures.scores import Point, metric_against_flops

    comparisons = [comparison for folder in folders for comparison in find_comparisons(folder)]
    metrics = sorted({comparison.metric for comparison in comparisons})
    if len(metrics) > 1:
        raise ValueError(f"the comparisons have different metrics ({', '.join(metrics)}); draw them one by one")
    points = [
        Point(_label(row["name"], c, comparisons), float(variant["flops"]), row["mean"], row["low"], row["high"])
        for c in comparisons
        for variant, row in zip(c.variants, c.statistics, strict=True)
        if variant.get("flops")
    ]
    if not points:
        raise ValueError(f"compare.json in {_listed(folders)} counts no operations (flops)")
    return metric_against_flops(points, metrics[0], _reference(comparisons))


def _read(folders: list[Path]) -> tuple[dict[str, list[Run]], list[Comparison]]:
    """Runs by name: those of comparisons under their variant; single runs of one variant count as its seeds."""
    comparisons = [read_comparison(folder) for folder in folders if is_comparison(folder)]
    runs: dict[str, list[Run]] = {}
    for comparison in comparisons:
        for name, group in comparison.runs().items():
            runs.setdefault(_label(name, comparison, comparisons), []).extend(group)
    for folder in folders:
        if is_comparison(folder):
            continue
        if not is_run(folder):
            raise ValueError(f"{folder} is neither a run (metrics.jsonl) nor a comparison (compare.json)")
        single = read_run(folder)
        runs.setdefault(str(single.summary.get("name") or folder.resolve().name), []).append(single)
    return runs, comparisons


def _label(name: str, comparison: Comparison, comparisons: list[Comparison]) -> str:
    return name if len(comparisons) == 1 else f"{comparison.folder.resolve().name}: {name}"


def _reference(comparisons: list[Comparison]) -> str | None:
    return comparisons[0].reference if len(comparisons) == 1 else None


def _listed(folders: list[Path]) -> str:
    return ", ".join(map(str, folders))
