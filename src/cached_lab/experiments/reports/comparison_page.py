"""The page of a comparison, or of a folder that holds several: one section for each.

What a page states is computed from the numbers beside it; the sentences that interpret a comparison come from
`wording.comparison_summary`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .cache_use_table import cache_use_table, legend
from .far_page import far_section
from .figures import scores
from .figures.style import COLOURS, looks
from .formatting import (
    MISSING,
    P_VALUES,
    Metric,
    comparison_summary,
    environment_text,
    pair_name,
    short_count,
    short_seconds,
)
from .page import FILE_NAME, Block, Cell, Folded, Header, Row, Section, Table, Text, pictured, titled, write_page
from .probe_page import probe_section
from .run_folder import Comparison, Run, find_comparisons
from .run_page import feature_maps, gates, learning_curves
from .variant_table import baseline_rows, difference_cells, variant_columns


def write_compare_report(folder: str | Path, sections: Sequence[str] | None = None) -> Path:
    """Write `report.html` into a comparison folder, or into a folder that holds several: one section for each.

    The page of several begins with the probes by distance beside them, and ends with the other probes (`cached probe`).

    Args:
        sections: names of the sub-folders to report on, in this order; None takes all.
    """
    folder = Path(folder)
    comparisons = find_comparisons(folder, sections)
    far, probes = (sorted(folder.glob(f"*/{name}.json")) for name in ("far", "probe")) if sections is None else ([], [])
    if len(comparisons) == 1 and not (far or probes):
        return write_page(folder, comparisons[0].title, [_section(comparisons[0], folder, 1, "a")])
    title = f"Comparisons in {folder.resolve().name}"
    blocks: list[Block] = [
        Header(1, title),
        *(far_section(path, 2, f"f{i}") for i, path in enumerate(far, start=1)),
        *(_section(comparison, folder, 2, f"s{i}") for i, comparison in enumerate(comparisons, start=1)),
        *(probe_section(path, 2, f"p{i}") for i, path in enumerate(probes, start=1)),
    ]
    return write_page(folder, title, blocks)


def _section(comparison: Comparison, root: Path, level: int, identifier: str) -> Section:
    data, metric, runs = comparison.data, Metric(comparison.metric), comparison.runs()
    reference, pairs, split = comparison.reference, comparison.pairs, comparison.split
    sentences = comparison_summary(comparison.statistics, reference, metric, split, comparison.baselines, pairs)
    records = {name: [run.records for run in group] for name, group in runs.items()}
    shares = {name: found for name, group in runs.items() if (found := [run.gates for run in group if run.gates])}
    about = {
        "command": data.get("command"),
        "date": data.get("date"),
        "seeds": ", ".join(map(str, data.get("seeds", []))),
        "environment": environment_text(data.get("environment")),
    }
    blocks = [
        Header(level, comparison.title, about),
        Text(" ".join(sentences), "summary"),
        _variants(comparison, metric),
        *_pairs(pairs, metric),
        *_differences(comparison, metric, identifier),
        *_cache_use(comparison, metric),
        *(learning_curves(records, f"{identifier}-curves", metric.name, reference) if records else []),
        *_cost(comparison, metric, identifier),
        *gates(shares, f"{identifier}-gates", reference),
    ]
    for i, (name, group) in enumerate(runs.items()):
        blocks += feature_maps(group[0], f"{identifier}-maps{i}", name)
    configs = [Folded(name, group[0].config) for name, group in runs.items() if group[0].config]
    blocks += _run_links(runs, root, metric)
    blocks += titled("Configurations", *configs) if configs else []
    return Section(blocks)


def _variants(comparison: Comparison, metric: Metric) -> Table:
    columns = variant_columns(comparison, metric)
    columns["variant"] = [cell._replace(mark=_mark(comparison, cell.text)) for cell in columns["variant"]]
    rows: list[Row] = list(zip(*columns.values(), strict=True))
    rows += baseline_rows(comparison, metric, [MISSING] * (len(columns) - 2))
    return Table(list(columns), rows, _variants_caption(comparison))


def _pairs(pairs: Sequence[Mapping[str, Any]], metric: Metric) -> list[Block]:
    rows: list[Row] = [[pair_name(pair), *difference_cells(pair, metric), str(pair["seeds"])] for pair in pairs]
    return [Table(["pair", "difference", *P_VALUES, "seeds"], rows, _pairs_caption(pairs))] if pairs else []


def _variants_caption(comparison: Comparison) -> str:
    text = "Mean over seeds; in brackets the 95 % t interval."
    if any(variant.get("last_values") for variant in comparison.variants):
        text += " Last step: the mean without choosing a checkpoint on the validation split."
    if any(variant.get("rows_interval") for variant in comparison.variants):
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


def _differences(comparison: Comparison, metric: Metric, identifier: str) -> list[Block]:
    compared = comparison.pairs or comparison.statistics
    rows = [scores.Difference(pair_name(r), **r["difference"]) for r in compared if r["difference"] is not None]
    if not rows:
        return []
    reference = None if comparison.pairs else comparison.reference
    words = "; ".join(
        f"{r.name} {metric.difference(r.mean)} {metric.interval(r.low, r.high, True)}".strip() for r in rows
    )
    words = f"Differences: {words}" if reference is None else f"Differences to {reference}: {words}"
    drawn = scores.differences(rows, reference, comparison.metric)
    caption = "Mean paired difference with its 95 % interval. Where that includes zero, no difference can be shown."
    return pictured("Differences", drawn, f"{identifier}-differences", words, caption)


def _cache_use(comparison: Comparison, metric: Metric) -> list[Block]:
    if not comparison.cache_use:
        return []
    header, lines = cache_use_table(comparison.cache_use, metric)
    rows: list[Row] = [[Cell(line[0], mark=_mark(comparison, line[0])), *line[1:]] for line in lines]
    caption = f"{comparison.split} {metric.name}; differences to carry in points where it is an accuracy. "
    return titled("Use of the cache", Table(header, rows, caption + legend(header[1:])))


def _cost(comparison: Comparison, metric: Metric, identifier: str) -> list[Block]:
    # Where rows are made equal in training, that is the cost that counts: a folded cache is cheaper than its training.
    training = all(variant.get("training_flops") for variant in comparison.variants)
    key = "training_flops" if training else "flops"
    points = [
        scores.Point(row["name"], float(variant[key]), row["mean"], row["low"], row["high"])
        for variant, row in zip(comparison.variants, comparison.statistics, strict=True)
        if variant.get(key)
    ]
    if not points:
        return []
    words = "; ".join(f"{p.name} {metric.value(p.mean)} at {short_count(p.flops)} operations" for p in points)
    words = f"{metric.name} against operations per forward pass: {words}"
    drawn = scores.metric_against_flops(points, metric.name, comparison.reference)
    which = "one forward pass in training, per row" if training else "one forward pass"
    caption = f"Mean over seeds with its 95 % interval, over the operations of {which}."
    return pictured(f"{metric.name.capitalize()} against cost", drawn, f"{identifier}-cost", words, caption)


def _run_links(runs: Mapping[str, Sequence[Run]], root: Path, metric: Metric) -> list[Block]:
    rows: list[Row] = []
    for name, group in runs.items():
        for run in group:
            report = run.folder / FILE_NAME
            link = quote(report.relative_to(root).as_posix()) if report.is_file() else ""
            values = [metric.value((run.summary.get(key) or {}).get(metric.name)) for key in ("best", "test")]
            seconds = short_seconds(run.summary.get("train_seconds"))
            rows.append([Cell(f"{name}, {run.folder.name}", link=link), *values, seconds])
    return titled("Runs", Table(["run", "best on validation", "test", "training time"], rows)) if rows else []


def _mark(comparison: Comparison, name: str) -> str:
    colour = looks([v["name"] for v in comparison.variants], comparison.reference)[name].colour
    return next(f"var(--{key})" for key, (light, _) in COLOURS.items() if light == colour)
