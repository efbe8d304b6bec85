"""Reports: one self-contained HTML page for a run, and one for a comparison (or a folder of comparisons).

A page asks nothing of the network and needs no other file. What it states is computed from the numbers beside it; the
sentences that interpret a comparison come from `wording.comparison_summary`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cached_transformers.experiments.cache_use.table import cache_use_table, legend
from cached_transformers.experiments.statistics import wilson_interval

from . import plots
from .detection_report import average_precisions
from .page import Cell, collapsible, environment_text, facts, figure, page, paragraph, table, write_page
from .probe_report import probe_section
from .run_folder import Comparison, Run, find_comparisons, read_run
from .style import COLOURS, inline_svg, looks
from .wording import (
    MISSING,
    Metric,
    comparison_summary,
    mean_of,
    pair_name,
    run_summary,
    short_count,
    short_p,
    short_seconds,
)

FILE_NAME = "report.html"
GATES_CAPTION = (
    "Share sigma(lambda) that each head gives to the memory; the rest goes to self-attention. Numbers by head are of "
    "the first seed: heads have no common order over seeds, so only the means by layer are compared."
)
LAST = ("test, last step", "test_last")
MAPS_CAPTION = (
    "Size of the output of self-attention and of the memory at each place, per layer. Each map has its own scale: "
    "compare places, not strengths."
)


def write_run_report(run_folder: str | Path) -> Path:
    """Write `report.html` into a run folder.

    Raises:
        ValueError: the folder holds no metrics.jsonl, or a damaged file.
        ImportError: matplotlib is not installed.
    """
    run = read_run(run_folder)
    summary, metric = run.summary, Metric(run.metric)
    title = str(summary.get("name") or run.folder.resolve().name)
    parts = [
        f"<header>{_heading(1, title)}",
        facts(
            {
                "task": summary.get("task"),
                "variant": summary.get("variant"),
                "seed": summary.get("seed"),
                "steps": summary.get("steps"),
                "date": (summary.get("environment") or {}).get("date"),
                "environment": environment_text(summary.get("environment")),
            }
        ),
        "</header>",
        paragraph(" ".join(run_summary(run.records, summary, metric)), "summary"),
        _run_table(summary, metric),
        average_precisions(summary),
        _curves({run.name: [run.records]}, "curves", metric.name, None),
        _places(run, "places"),
        _gates({run.name: [run.gates]} if run.gates else {}, "gates", None),
        _maps(run, "maps"),
        _heading(3, "Configuration") + collapsible("config.yaml", run.config) if run.config else "",
    ]
    return write_page(run.folder / FILE_NAME, page(title, "\n".join(filter(None, parts))))


def write_compare_report(folder: str | Path, sections: Sequence[str] | None = None) -> Path:
    """Write `report.html` into a comparison folder, or into a folder that holds several: one section for each.

    The page of several comparisons ends with the probes beside them (`cached probe`).

    Args:
        sections: names of the sub-folders to report on, in this order; None takes all.

    Raises:
        ValueError: no compare.json is found, or a damaged file.
        ImportError: matplotlib is not installed.
    """
    folder = Path(folder)
    comparisons = find_comparisons(folder, sections)
    if len(comparisons) == 1:
        title = comparisons[0].title
        body = _comparison(comparisons[0], folder, 1, "a")
    else:
        title = f"Comparisons in {folder.resolve().name}"
        bodies = [_comparison(c, folder, 2, f"s{i}") for i, c in enumerate(comparisons, start=1)]
        probes = sorted(folder.glob("*/probe.json")) if sections is None else []
        bodies += [probe_section(path, 2, f"p{i}") for i, path in enumerate(probes, start=1)]
        body = "\n".join([f"<header>{_heading(1, title)}</header>", *bodies])
    return write_page(folder / FILE_NAME, page(title, body))


def _comparison(comparison: Comparison, root: Path, level: int, identifier: str) -> str:
    data, metric, runs = comparison.data, Metric(comparison.metric), comparison.runs()
    split, reference, baselines = comparison.split, comparison.reference, comparison.baselines
    gates = {name: [run.gates for run in group if run.gates] for name, group in runs.items()}
    sentences = comparison_summary(comparison.statistics, reference, metric, split, baselines, comparison.pairs)
    records = {name: [run.records for run in group] for name, group in runs.items()}
    parts = [
        f"<section><header>{_heading(level, comparison.title)}",
        facts(
            {
                "command": data.get("command"),
                "date": data.get("date"),
                "seeds": ", ".join(map(str, data.get("seeds", []))),
                "environment": environment_text(data.get("environment")),
            }
        ),
        "</header>",
        paragraph(" ".join(sentences), "summary"),
        _variant_table(comparison, metric, split),
        _pair_table(comparison, metric),
        _differences(comparison, identifier),
        _cache_use(comparison, metric),
        _curves(records, f"{identifier}-curves", metric.name, reference) if records else "",
        _cost(comparison, identifier),
        _gates({name: group for name, group in gates.items() if group}, f"{identifier}-gates", reference),
        *(_maps(group[0], f"{identifier}-maps{i}", name) for i, (name, group) in enumerate(runs.items())),
        _run_links(runs, root, metric),
        _configs(runs),
        "</section>",
    ]
    return "\n".join(filter(None, parts))


def _variant_table(comparison: Comparison, metric: Metric, split: str) -> str:
    variants, paired = comparison.variants, bool(comparison.pairs)
    base = next(v for v in variants if v["name"] == comparison.reference)
    header = ["variant", f"{split} {metric.name}"]
    by_rows = any(variant.get("rows_interval") for variant in variants)
    header += ["interval by rows"] if by_rows else []
    last = any(variant.get("last_values") for variant in variants)
    header += ["last step"] if last else []
    differing = [] if paired else [f"difference to {comparison.reference}", "p"]
    header += [*differing, "p (Holm)"] if differing and len(variants) > 2 else differing
    cost = {"parameters": ("parameters", short_count), "flops": ("operations", short_count)}
    if any(variant.get("training_flops") for variant in variants):
        cost["training_flops"] = ("operations in training", short_count)
    cost["seconds_per_step"] = ("time per step", short_seconds)
    header += [title for title, _ in cost.values()]
    protocols = any(variant.get("protocol") for variant in variants)
    header += ["protocol"] if protocols else []
    rows = []
    for variant, row in zip(variants, comparison.statistics, strict=True):
        cells: list[Cell | str] = [
            Cell(row["name"], mark=_mark(comparison, row["name"])),
            Cell(metric.value(row["mean"]), metric.interval(row["low"], row["high"])),
        ]
        cells += [metric.interval(*variant["rows_interval"])] if by_rows else []
        cells += [metric.value(mean_of(variant.get("last_values")))] if last else []
        cells += [] if paired else _difference_cells(row, metric, len(variants) > 2)
        for key, (_, write) in cost.items():
            cells.append(Cell(write(variant.get(key)), _relative(variant.get(key), base.get(key))))
        cells += [str(variant.get("protocol", MISSING))] if protocols else []
        rows.append(cells)
    for name, value in comparison.baselines.items():
        rows.append([Cell(f"baseline: {name}"), metric.value(value), *[MISSING] * (len(header) - 2)])
    return table(header, rows, _table_caption(comparison, by_rows))


def _difference_cells(row: Mapping[str, Any], metric: Metric, several: bool) -> list[Cell | str]:
    difference = row["difference"] or {"mean": None, "low": None, "high": None}
    interval = metric.interval(difference["low"], difference["high"], True)
    cells: list[Cell | str] = [Cell(metric.difference(difference["mean"]), interval), short_p(row["p_value"])]
    return [*cells, short_p(row["p_adjusted"])] if several else cells


def _pair_table(comparison: Comparison, metric: Metric) -> str:
    if not comparison.pairs:
        return ""
    rows: list[list[Cell | str]] = []
    for pair in comparison.pairs:
        rows.append([Cell(pair_name(pair)), *_difference_cells(pair, metric, True), str(pair["seeds"])])
    return table(["pair", "difference", "p", "p (Holm)", "seeds"], rows, _pairs_caption(comparison.pairs))


def _table_caption(comparison: Comparison, by_rows: bool) -> str:
    text = "Mean over seeds; in brackets the 95 % t interval."
    if any(variant.get("last_values") for variant in comparison.variants):
        text += " Last step: the mean without choosing a checkpoint on the validation split."
    if by_rows:
        rows = comparison.data.get("rows")
        how = f"Wilson's, of that mean on {rows:,} rows" if rows else "the mean of the runs' bootstrap intervals"
        text += (
            f" The interval by rows is {how}: the chance in drawing the rows, which all seeds share and the t interval "
            "does not hold."
        )
    text += " Operations are of one forward pass at the batch of the comparison, a multiply-add as two"
    if any(variant.get("training_flops") for variant in comparison.variants):
        text += "; those in training are per row of a training batch, and controls are made equal in them"
    return text + "." + ("" if comparison.pairs else " " + _pairs_caption(comparison.statistics))


def _pairs_caption(rows: Sequence[Mapping[str, Any]]) -> str:
    text = "Differences pair the runs of the same seed; p is of the paired t-test."
    smallest = {r["p_sign_flip_smallest"] for r in rows} - {None}
    if smallest:
        flips = ", ".join(f"{pair_name(r)} {r['p_sign_flip']:.3g}" for r in rows if r["p_sign_flip"] is not None)
        text += f" Exact sign-flip test: {flips}; with this many seeds it cannot fall below {max(smallest):.3g}."
    notes = {f"{pair_name(r)}: {r['note']}" for r in rows if r["note"]}
    return text + "".join(f" {note}." for note in sorted(notes))


def _differences(comparison: Comparison, identifier: str) -> str:
    compared = comparison.pairs or comparison.statistics
    rows = [plots.Difference(pair_name(r), **r["difference"]) for r in compared if r["difference"] is not None]
    if not rows:
        return ""
    metric = Metric(comparison.metric)
    words = "; ".join(
        f"{r.name} {metric.difference(r.mean)} {metric.interval(r.low, r.high, True)}".strip() for r in rows
    )
    reference = None if comparison.pairs else comparison.reference
    svg = inline_svg(
        plots.differences(rows, reference, comparison.metric),
        f"{identifier}-differences",
        f"Differences: {words}" if reference is None else f"Differences to {reference}: {words}",
    )
    return _heading(3, "Differences") + figure(
        svg,
        "Mean paired difference with its 95 % interval. Where that includes zero, no difference can be shown.",
    )


def _cache_use(comparison: Comparison, metric: Metric) -> str:
    if not comparison.cache_use:
        return ""
    header, lines = cache_use_table(comparison.cache_use, metric)
    cells: list[list[Cell | str]] = [[Cell(line[0], mark=_mark(comparison, line[0])), *line[1:]] for line in lines]
    caption = f"{comparison.split} {metric.name}; differences to carry in points where it is an accuracy. "
    return _heading(3, "Use of the cache") + table(header, cells, caption + legend(header[1:]))


def _cost(comparison: Comparison, identifier: str) -> str:
    # Where rows are made equal in training, that is the cost that counts: a folded cache is cheaper than its training.
    training = all(variant.get("training_flops") for variant in comparison.variants)
    key = "training_flops" if training else "flops"
    points = [
        plots.Point(row["name"], float(variant[key]), row["mean"], row["low"], row["high"])
        for variant, row in zip(comparison.variants, comparison.statistics, strict=True)
        if variant.get(key)
    ]
    if not points:
        return ""
    metric = Metric(comparison.metric)
    words = "; ".join(f"{p.name} {metric.value(p.mean)} at {short_count(p.flops)} operations" for p in points)
    svg = inline_svg(
        plots.metric_against_flops(points, metric.name, comparison.reference),
        f"{identifier}-cost",
        f"{metric.name} against operations per forward pass: {words}",
    )
    which = "one forward pass in training, per row" if training else "one forward pass"
    return _heading(3, f"{metric.name.capitalize()} against cost") + figure(
        svg, f"Mean over seeds with its 95 % interval, over the operations of {which}."
    )


def _curves(runs: Mapping[str, Sequence[plots.Records]], identifier: str, metric: str, reference: str | None) -> str:
    try:
        drawn = plots.learning_curves(runs, metric, reference)
    except ValueError:  # nothing recorded yet: no section
        return ""
    svg = inline_svg(drawn, identifier, f"Learning curves of {', '.join(runs)}")
    several = any(len(seeds) > 1 for seeds in runs.values())
    caption = "Mean over seeds; the band runs from the lowest to the highest seed." if several else "One seed."
    return _heading(3, "Learning curves") + figure(svg, caption)


def _gates(layers_by_variant: Mapping[str, Sequence[Any]], identifier: str, reference: str | None) -> str:
    if not layers_by_variant:
        return ""
    svg = inline_svg(
        plots.gates(layers_by_variant, reference),
        identifier,
        f"Memory share by layer and head of {', '.join(layers_by_variant)}",
    )
    return _heading(3, "Gates") + figure(svg, GATES_CAPTION)


def _places(run: Run, identifier: str) -> str:
    scores = [row for row in (run.evaluation or {}).get("scores", []) if row.get("places")]
    if not scores:
        return ""
    lines = {row["memory"]: [(p["from"], p["to"], p["loss"]) for p in row["places"]] for row in scores}
    svg = inline_svg(plots.loss_by_place(lines), identifier, "Loss by place in the document")
    split = (run.evaluation or {}).get("split")
    text = f"Loss of the {split} tokens at these places of their documents, by what rows keep of memory."
    return _heading(3, "Loss by place in the document") + figure(svg, text)


def _maps(run: Run, identifier: str, name: str = "") -> str:
    maps = run.feature_maps()
    if maps is None:
        return ""
    drawn = plots.feature_maps(maps["image"], maps["self"], maps["memory"])
    svg = inline_svg(drawn, identifier, "Images with the outputs of self-attention and of the memory, layer by layer")
    return _heading(3, f"Feature maps: {name}" if name else "Feature maps") + figure(svg, MAPS_CAPTION)


def _run_table(summary: Mapping[str, Any], metric: Metric) -> str:
    rows: list[list[Cell | str]] = []
    parts = (("best on validation", "best"), ("at the end", "final"), ("test", "test"), LAST)
    top5 = ["top5_accuracy"] if any("top5_accuracy" in (summary.get(key) or {}) for _, key in parts) else []
    translated = [name for name in ("bleu", "chrf", "tokenised_bleu") if name in (summary.get("test") or {})]
    names = list(dict.fromkeys([metric.name, *top5, *translated, "loss"]))
    for label, key in parts:
        values = summary.get(key)
        if values:
            step = values.get("step")
            shown: list[Cell | str] = [
                Cell(Metric(name).value(values.get(name)), small=rows_interval(values, Metric(name))) for name in names
            ]
            rows.append([label, *shown, MISSING if step is None else f"{step:,}"])
    for name, value in (summary.get("baselines") or {}).items():
        rows.append([f"baseline: {name}", metric.value(value), *[MISSING] * len(names)])
    cost = facts(
        {
            "parameters": _or_nothing(short_count, summary.get("parameters")),
            "operations": _or_nothing(short_count, summary.get("flops")),
            "time per step": _or_nothing(short_seconds, summary.get("seconds_per_step")),
            "training time": _or_nothing(short_seconds, summary.get("train_seconds")),
        }
    )
    return (table(["", *names, "step"], rows) if rows else "") + cost


def rows_interval(values: Mapping[str, Any], metric: Metric) -> str:
    """Wilson's 95 % interval of an accuracy from the rows that were scored, or what stands beside a score as its
    interval over rows; empty where there is none."""
    rows, value = values.get("rows"), values.get(metric.name)
    if f"{metric.name}_interval" in values and not metric.percent:
        return metric.interval(*values[f"{metric.name}_interval"])
    if not rows or value is None or not metric.percent:
        return ""
    interval = wilson_interval(round(value * rows), rows)
    return metric.interval(interval.low, interval.high)


def _run_links(runs: Mapping[str, Sequence[Run]], root: Path, metric: Metric) -> str:
    if not runs:
        return ""
    rows: list[list[Cell | str]] = []
    for name, group in runs.items():
        for run in group:
            report = run.folder / FILE_NAME
            link = quote(report.relative_to(root).as_posix()) if report.is_file() else ""
            best, test = run.summary.get("best") or {}, run.summary.get("test") or {}
            rows.append(
                [
                    Cell(f"{name}, {run.folder.name}", link=link),
                    metric.value(best.get(metric.name)),
                    metric.value(test.get(metric.name)),
                    short_seconds(run.summary.get("train_seconds")),
                ]
            )
    return _heading(3, "Runs") + table(["run", "best on validation", "test", "training time"], rows)


def _configs(runs: Mapping[str, Sequence[Run]]) -> str:
    shown = [collapsible(name, group[0].config) for name, group in runs.items() if group[0].config]
    return _heading(3, "Configurations") + "".join(shown) if shown else ""


def _mark(comparison: Comparison, name: str) -> str:
    colour = looks([v["name"] for v in comparison.variants], comparison.reference)[name].colour
    return next(f"var(--{key})" for key, (light, _) in COLOURS.items() if light == colour)


def _relative(value: float | None, base: float | None) -> str:
    return f"{value / base:.3g} \N{MULTIPLICATION SIGN}" if value and base else ""


def _or_nothing(write: Any, value: float | None) -> str:
    return "" if value is None else write(value)


def _heading(level: int, text: str) -> str:
    return f"<h{level}>{escape(text)}</h{level}>"
