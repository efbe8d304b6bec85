"""Tables of a comparison for the terminal, Markdown and HTML, and the page of one or several comparisons.

All statements are computed from the numbers beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from cached_transformers.files import write_whole

from .blocks import Block, FactList, Folded, Heading, Paragraph, ReportTable, TableCell, TableRow
from .far_page import far_section
from .figures import scores
from .figures.paper import FormPoint, accuracy_against_flops
from .figures.style import COLOURS, looks
from .formatting import (
    MISSING,
    P_VALUES,
    Metric,
    comparison_summary,
    environment_text,
    pair_name,
    short_count,
    short_p,
    short_seconds,
)
from .markdown import to_markdown
from .page import FILE_NAME, pictured, titled, write_page
from .probe_page import probe_section
from .run_folder import Run, StoredComparison, find_comparisons, read_comparison
from .run_page import feature_maps, gates, learning_curves
from .terminal import show

if TYPE_CHECKING:
    from rich.console import Console

COSTS = {
    "parameters": ("parameters", short_count),
    "operations": ("flops", short_count),
    "operations in training": ("training_flops", short_count),
    "time per step": ("seconds_per_step", short_seconds),
}
"""Columns of costs: the key in compare.json, and the format."""
CACHE_MODES = {
    "carry": "as training left it",
    "reset": "emptied",
    "shuffle": "its entries permuted",
    "other": "the cache of another seed's run",
}
Rows = Sequence[dict[str, Any]]


def write_compare_report(folder: str | Path, sections: Sequence[str] | None = None) -> Path:
    """Write `report.html` into a comparison folder, or into a folder of several comparisons.

    The page of several begins with the probes by distance beside them, and ends with the other probes (`cached probe`).

    Args:
        sections: names of the sub-folders to report on, in this order; None takes all.
    """
    folder = Path(folder)
    comparisons = find_comparisons(folder, sections)
    far, probes = (sorted(folder.glob(f"*/{name}.json")) for name in ("far", "probe")) if sections is None else ([], [])
    if len(comparisons) == 1 and not (far or probes):
        return write_page(folder, comparisons[0].title, _section(comparisons[0], folder, 1, "a"))
    title = f"Comparisons in {folder.resolve().name}"
    blocks: list[Block] = [Heading(1, title)]
    for i, path in enumerate(far, start=1):
        blocks += far_section(path, 2, f"f{i}")
    for i, comparison in enumerate(comparisons, start=1):
        blocks += _section(comparison, folder, 2, f"s{i}")
    for i, path in enumerate(probes, start=1):
        blocks += probe_section(path, 2, f"p{i}")
    return write_page(folder, title, blocks)


def write_markdown(folder: str | Path) -> Path:
    """Write `compare.md` beside `compare.json`; returns its path."""
    path = Path(folder) / "compare.md"
    write_whole(path, comparison_markdown(read_comparison(folder)).encode())
    return path


def comparison_markdown(comparison: StoredComparison) -> str:
    """The circumstances, findings and tables of a comparison as Markdown."""
    metric = Metric(comparison.metric)
    return to_markdown([*_findings(comparison, 1, {}), *_cache_use_blocks(comparison, metric, {})])


def print_statistics(
    statistics: Rows,
    metric_name: str,
    split: str,
    reference: str,
    console: Console,
    protocols: Mapping[str, str] | None = None,
    *,
    pairs: Rows = (),
    rows_intervals: Mapping[str, tuple[float, float]] | None = None,
    baselines: Mapping[str, float] | None = None,
) -> None:
    """Print the tables of variants and pairs, and below them how each variant was scored (`protocols`).

    Args:
        statistics: rows of `statistics.summarise`. pairs: rows of `statistics.summarise_pairs`.
        rows_intervals: by variant, the interval that the number of scored rows leaves. baselines: scores of guessers.
    """
    metric, intervals = Metric(metric_name), rows_intervals or {}
    variants = [{"name": row["name"], "rows_interval": intervals.get(row["name"])} for row in statistics]
    show(console, _variants(statistics, variants, metric, split, reference, baselines or {}))
    show(console, *_pairs(pairs, metric))
    if protocols:  # too long for a column of a narrow terminal
        width = max(len(row["name"]) for row in statistics)
        lines = [f"{row['name']:<{width}}  {protocols.get(row['name'], '')}" for row in statistics]
        show(console, *map(Paragraph, ["protocol", *lines]))


def print_comparison(comparison: StoredComparison, console: Console) -> None:
    """Print the tables of a comparison below its title."""
    intervals = {v["name"]: tuple(v["rows_interval"]) for v in comparison.variants if v.get("rows_interval")}
    console.print(f"\n{comparison.title}", markup=False)
    print_statistics(
        comparison.statistics,
        comparison.metric,
        comparison.split,
        comparison.reference,
        console,
        pairs=comparison.pairs,
        rows_intervals=intervals,
        baselines=comparison.baselines,
    )
    if comparison.cache_use:
        print_cache_use(comparison.cache_use, Metric(comparison.metric), comparison.split, console)


def print_cache_use(rows: Sequence[tuple[str, Rows]], metric: Metric, split: str, console: Console) -> None:
    """Print the scores with the caches changed."""
    show(console, _cache_use(rows, metric, split))


def _section(comparison: StoredComparison, root: Path, level: int, identifier: str) -> list[Block]:
    metric, runs, reference = Metric(comparison.metric), comparison.runs(), comparison.reference
    records = {name: [run.records for run in group] for name, group in runs.items()}
    shares = {name: found for name, group in runs.items() if (found := [run.gates for run in group if run.gates])}
    variant_looks = looks([v["name"] for v in comparison.variants], reference)
    variables = {light: f"var(--{name})" for name, (light, _) in COLOURS.items()}
    marks = {name: variables[look.colour] for name, look in variant_looks.items()}
    blocks = [
        *_findings(comparison, level, marks),
        *_differences(comparison, metric, identifier),
        *_cache_use_blocks(comparison, metric, marks),
        *(learning_curves(records, f"{identifier}-curves", metric.name, reference) if records else []),
        *_cost(comparison, metric, identifier),
        *gates(shares, f"{identifier}-gates"),
    ]
    for i, (name, group) in enumerate(runs.items()):
        blocks += feature_maps(group[0], f"{identifier}-maps{i}", name)
    configs = [Folded(name, group[0].config) for name, group in runs.items() if group[0].config]
    blocks += _run_links(runs, root, metric)
    return blocks + (titled("Configurations", *configs) if configs else [])


def _findings(comparison: StoredComparison, level: int, marks: Mapping[str, str]) -> list[Block]:
    """Title, circumstances, summary, and the tables of variants and pairs."""
    data, metric, pairs, split = comparison.data, Metric(comparison.metric), comparison.pairs, comparison.split
    statistics, reference, baselines = comparison.statistics, comparison.reference, comparison.baselines
    facts = {key: data.get(key) for key in ("command", "date")}
    facts |= {
        "seeds": ", ".join(map(str, data.get("seeds", []))),
        "environment": environment_text(data.get("environment")),
    }
    summary = " ".join(comparison_summary(statistics, reference, metric, split, baselines, pairs))
    notes = _notes(comparison) + ("" if pairs else f" {_test_notes(statistics)}")
    return [
        Heading(level, comparison.title),
        FactList(facts),
        Paragraph(summary, "summary"),
        _variants(statistics, comparison.variants, metric, split, reference, baselines, marks, notes),
        *_pairs(pairs, metric, _test_notes(pairs)),
    ]


def _variants(
    statistics: Rows,
    variants: Sequence[Mapping[str, Any]],
    metric: Metric,
    split: str,
    reference: str,
    baselines: Mapping[str, float],
    marks: Mapping[str, str] | None = None,
    notes: str = "",
) -> ReportTable:
    """A row per variant and baseline; the small print of a cost is its ratio to the reference's cost.

    Args:
        variants: entries of compare.json, in the order of `statistics`; columns without a value are left out.
        reference: the variant that the others are tested against, unless pairs are tested; its costs are 1.
    """
    score = f"{split} {metric.name}"
    columns: dict[str, list[TableCell]] = {
        "variant": [TableCell(row["name"], mark=(marks or {}).get(row["name"], "")) for row in statistics],
        score: [TableCell(metric.value(r["mean"]), metric.interval(r["low"], r["high"])) for r in statistics],
    }
    if any(v.get("rows_interval") for v in variants):
        intervals = [v.get("rows_interval") or (None, None) for v in variants]
        columns["interval by rows"] = [TableCell(metric.interval(*interval)) for interval in intervals]
    if any(v.get("last_values") for v in variants):
        last = [v.get("last_values") or [] for v in variants]
        columns["last step"] = [TableCell(metric.value(sum(x) / len(x) if x else None)) for x in last]
    tested = any(row["difference"] is not None for row in statistics)
    if tested:
        heads = [f"difference to {reference}", *(P_VALUES if len(statistics) > 2 else ["p"])]
        cells = [_difference_cells(row, metric) for row in statistics]
        columns |= {head: list(column) for head, column in zip(heads, zip(*cells, strict=True), strict=False)}
    columns["seeds"] = [TableCell(str(row["seeds"])) for row in statistics]
    base = next((v for v in variants if v["name"] == reference), variants[0])
    for head, (key, write) in COSTS.items():
        if any(v.get(key) for v in variants):
            costs = [(v.get(key), base.get(key)) for v in variants]
            ratios = [f"({x / y:.3g} \N{MULTIPLICATION SIGN})" if x and y else "" for x, y in costs]
            columns[head] = [TableCell(write(x), ratio) for (x, _), ratio in zip(costs, ratios, strict=True)]
    if any(v.get("protocol") for v in variants):
        columns["protocol"] = [TableCell(str(v.get("protocol", MISSING))) for v in variants]
    rows: list[TableRow] = list(zip(*columns.values(), strict=True))
    fillers = [""] * (len(columns) - 2)
    rows += [[f"baseline: {name}", metric.value(x), *fillers] for name, x in baselines.items()]
    return ReportTable(list(columns), rows, notes, score + (f", reference {reference}" if tested else ""))


def _difference_cells(row: Mapping[str, Any], metric: Metric) -> list[TableCell]:
    """The difference with its interval, p, and p after Holm; empty for the reference."""
    if row["difference"] is None:
        return [TableCell("")] * 3
    mean, low, high = (row["difference"][key] for key in ("mean", "low", "high"))
    cell = TableCell(metric.difference(mean), metric.interval(low, high, signed=True))
    return [cell, TableCell(short_p(row["p_value"])), TableCell(short_p(row["p_adjusted"]))]


def _pairs(pairs: Rows, metric: Metric, notes: str = "") -> list[Block]:
    rows: list[TableRow] = [[pair_name(r), *_difference_cells(r, metric), str(r["seeds"])] for r in pairs]
    return [ReportTable(["pair", "difference", *P_VALUES, "seeds"], rows, notes, "paired differences")] if rows else []


def _notes(comparison: StoredComparison) -> str:
    def any_has(key: str) -> bool:
        return any(variant.get(key) for variant in comparison.variants)

    text = "Mean over seeds; in brackets the 95 % t interval."
    if any_has("last_values"):
        text += " Last step: the mean without choosing a checkpoint on the validation split."
    if any_has("rows_interval"):
        rows = comparison.data.get("rows")
        how = f"Wilson's, of that mean on {rows:,} rows" if rows else "the mean of the runs' bootstrap intervals"
        text += f" The interval by rows is {how}: the chance in sampling the rows, which all seeds share."
    text += " Operations are of one forward pass at the batch of the comparison, a multiply-add as two"
    if any_has("training_flops"):
        text += "; those in training are per row of a training batch, and controls are made equal in them"
    return text + "."


def _test_notes(rows: Rows) -> str:
    text = "Differences pair the runs of the same seed; p is of the paired t-test."
    notes = {f"{pair_name(r)}: {r['note']}" for r in rows if r["note"]}
    return text + "".join(f" {note}." for note in sorted(notes))


def _cache_use(
    rows: Sequence[tuple[str, Rows]], metric: Metric, split: str, marks: Mapping[str, str] | None = None
) -> ReportTable:
    """A line per variant, a column per change of the cache, with its difference to "carry"."""
    modes = list(dict.fromkeys(row["name"] for _, statistics in rows for row in statistics))
    lines: list[TableRow] = []
    for name, statistics in rows:
        by_mode = {row["name"]: row for row in statistics}
        cells = [_cache_cell(by_mode.get(mode), metric) for mode in modes]
        lines.append([TableCell(name, mark=(marks or {}).get(name, "")), *cells])
    words = [f"{mode}: {CACHE_MODES[mode]}" for mode in modes if mode in CACHE_MODES]
    if any(mode.startswith("batch ") for mode in modes):
        words.append("batch N: updated by each batch of N rows, as in training, and not stored")
    notes = f"{split} {metric.name}; differences to carry are in points for an accuracy. "
    notes += f"The same trained weights with changed caches. {'; '.join(words)}."
    return ReportTable(["variant", *modes], lines, notes, f"use of the cache: {split} {metric.name}")


def _cache_cell(row: Mapping[str, Any] | None, metric: Metric) -> str:
    if row is None:
        return ""
    if row["difference"] is None:
        return f"{metric.value(row['mean'])} {metric.interval(row['low'], row['high'])}".strip()
    mean, low, high = (row["difference"][key] for key in ("mean", "low", "high"))
    p = "" if row["p_value"] is None else f", p {short_p(row['p_value'])}"
    return f"{metric.difference(mean, unit=False)} {metric.interval(low, high, signed=True)}{p}".strip()


def _cache_use_blocks(comparison: StoredComparison, metric: Metric, marks: Mapping[str, str]) -> list[Block]:
    if not comparison.cache_use:
        return []
    return titled("Use of the cache", _cache_use(comparison.cache_use, metric, comparison.split, marks))


def _differences(comparison: StoredComparison, metric: Metric, identifier: str) -> list[Block]:
    compared = comparison.pairs or comparison.statistics
    rows = [scores.DifferenceBar(pair_name(r), **r["difference"]) for r in compared if r["difference"] is not None]
    if not rows:
        return []
    reference = None if comparison.pairs else comparison.reference
    words = "; ".join(f"{r.name} {metric.difference(r.mean)} {metric.interval(r.low, r.high, True)}" for r in rows)
    words = f"Differences{f' to {reference}' if reference else ''}: {words}"
    drawn = scores.differences(rows, reference, comparison.metric)
    caption = "Mean paired difference with its 95 % interval. If that includes zero, no difference can be shown."
    return pictured("Differences", drawn, f"{identifier}-differences", words, caption)


def _cost(comparison: StoredComparison, metric: Metric, identifier: str) -> list[Block]:
    # If variants are made equal in training, that cost counts: a folded cache is cheaper than its training.
    training = all(variant.get("training_flops") for variant in comparison.variants)
    key = "training_flops" if training else "flops"
    variants = [v for v in comparison.variants if v.get(key)]
    if not variants:
        return []
    points = [FormPoint(str(v["name"]), "", float(v[key]), v["values"]) for v in variants]
    words = f"{metric.name} against operations per forward pass, as in the table"
    counted = "one forward pass in training, per row" if training else "one forward pass"
    drawn = accuracy_against_flops(points, metric.name, counted, comparison.reference)
    caption = f"Mean over seeds with its 95 % interval, over the operations of {counted}."
    return pictured(f"{metric.name.capitalize()} against cost", drawn, f"{identifier}-cost", words, caption)


def _run_links(runs: Mapping[str, Sequence[Run]], root: Path, metric: Metric) -> list[Block]:
    rows: list[TableRow] = []
    for name, group in runs.items():
        for run in group:
            report = run.folder / FILE_NAME
            link = quote(report.relative_to(root).as_posix()) if report.is_file() else ""
            values = [metric.value((run.summary.get(key) or {}).get(metric.name)) for key in ("best", "test")]
            seconds = short_seconds(run.summary.get("train_seconds"))
            rows.append([TableCell(f"{name}, {run.folder.name}", link=link), *values, seconds])
    return titled("Runs", ReportTable(["run", "best on validation", "test", "training time"], rows)) if rows else []
