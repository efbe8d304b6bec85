"""Tables of a comparison for the terminal, Markdown and HTML, and the page of one or several comparisons."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from cached_transformers.files import write_whole

from .blocks import Block, FactList, Heading, Picture, ReportTable, Rows
from .figures.paper import FormPoint, accuracy_against_flops
from .formatting import MINUS, Metric, environment_text, share_text, short_count, short_p, short_seconds
from .markdown import to_markdown
from .page import write_page
from .probe_page import probe_blocks
from .read_page import read_blocks
from .run_folder import StoredComparison, find_comparisons, read_comparison
from .run_page import curves, gates

P_VALUES = {"p (uncorrected)": "p_value", "p (Holm)": "p_adjusted"}
NOTES = (
    "Mean over seeds; in brackets the 95 % t interval. Last step: without choosing a checkpoint by validation. "
    "Interval by rows: the chance in sampling the rows, which all seeds share; Wilson's, or the mean of the runs' "
    "bootstrap intervals. Operations are of one forward pass, in training per row; a multiply-add counts as two. "
    "Differences pair the runs of the same seed; p is of the paired t-test, before and after Holm's correction, and of "
    "the exact sign-flip test, which n seeds cannot bring below 2 / 2^n."
)


def write_compare_report(folder: Path) -> Path:
    """Write `report.html` into the folder of a comparison, or of several comparisons and probes.

    Long texts come first, then probes by distance; other probes (`cached probe`) come last.
    """
    comparisons = find_comparisons(folder)
    read, far, probes = (sorted(folder.glob(f"*/{name}.json")) for name in ("read", "far", "probe"))
    parts = [
        *map(read_blocks, read),
        *map(probe_blocks, far),
        *map(comparison_blocks, comparisons),
        *map(probe_blocks, probes),
    ]
    title = comparisons[0].data["recipe"] if len(parts) == 1 else f"Comparisons in {folder.resolve().name}"
    return write_page(folder, title, [block for part in parts for block in part])


def write_markdown(folder: Path) -> Path:
    """Write the findings of compare.json as `compare.md` beside it."""
    path = folder / "compare.md"
    write_whole(path, to_markdown(findings(read_comparison(folder))).encode())
    return path


def comparison_blocks(comparison: StoredComparison) -> list[Block]:
    """Findings, learning curves, costs and gates."""
    data, runs = comparison.data, comparison.runs()
    records = {name: [run.records for run in group] for name, group in runs.items()}
    shares = {name: found for name, group in runs.items() if (found := [run.gates for run in group if run.gates])}
    blocks = findings(comparison)
    blocks += curves(records, data["metric"], data["reference"])
    # If variants are made equal in training, that cost counts: a folded cache is cheaper than its training.
    training = all(variant.get("training_flops") for variant in data["variants"])
    cost = "one forward pass in training, per row" if training else "one forward pass"
    key = "training_flops" if training else "flops"
    if points := [FormPoint(str(v["name"]), "", v[key], v["values"]) for v in data["variants"] if v.get(key)]:
        figure = accuracy_against_flops(points, data["metric"], cost, data["reference"])
        caption = f"Mean over seeds with its 95 % interval, over the operations of {cost}."
        blocks += [Heading("Cost"), Picture(figure, caption)]
    return blocks + gates(shares)


def findings(comparison: StoredComparison) -> list[Block]:
    """Title, circumstances, and all tables."""
    data, metric = comparison.data, Metric(comparison.data["metric"])
    facts = {"command": data.get("command"), "date": data.get("date"), "seeds": ", ".join(map(str, data["seeds"]))}
    facts["environment"] = environment_text(data.get("environment"))
    found: list[Block] = [Heading(data["recipe"], 1), FactList(facts)]
    found.append(_variants(data, comparison.statistics, f"{data['split']} {metric.name}"))
    if comparison.pairs:
        named = [(f"{row['name']} {MINUS} {row['against']}", row) for row in comparison.pairs]
        lines = [[name, *_difference_cells(row, metric), str(row["seeds"])] for name, row in named]
        found.append(ReportTable(("pair", "difference", *P_VALUES, "seeds"), lines, title="paired differences"))
    changed = {"metric": metric.name, "split": data["split"], "reference": "carry", "variants": []}
    uses = [_variants(changed, rows, f"Use of the cache: {name}") for name, rows in comparison.cache_use]
    return [*found, f"{NOTES} {data.get('efficiency', '')}".rstrip(), *uses]


def _variants(data: Mapping[str, Any], statistics: Rows, title: str) -> ReportTable:
    """A row per variant and baseline; columns without a value are left out.

    Args:
        data: as in compare.json, with `variants` in the order of `statistics`.
    """
    metric, variants = Metric(data["metric"]), data["variants"]
    score = f"{data['split']} {metric.name}"
    columns = {
        "variant": [str(row["name"]) for row in statistics],
        score: [_with_interval(metric, row) for row in statistics],
    }
    tested = any(row["difference"] is not None for row in statistics)
    if tested:
        heads = (f"difference to {data['reference']}", *P_VALUES)
        cells = zip(*(_difference_cells(row, metric) for row in statistics), strict=True)
        columns |= {head: list(column) for head, column in zip(heads, cells, strict=True)}
    if any("efficiency" in v for v in variants):
        columns["efficiency"] = [share_text(v.get("efficiency")) for v in variants]
    columns["seeds"] = [str(row["seeds"]) for row in statistics]
    optional: dict[str, tuple[str, Callable[[Any], str]]] = {
        "interval by rows": ("rows_interval", lambda ends: metric.interval(*ends)),
        "last step": ("last_values", lambda values: metric.value(mean(values))),
        "parameters": ("parameters", short_count),
        "operations": ("flops", short_count),
        "operations in training": ("training_flops", short_count),
        "time per step": ("seconds_per_step", short_seconds),
        "protocol": ("protocol", str),
        "tuned": ("tuned", str),
    }
    for head, (key, write) in optional.items():
        if any(v.get(key) for v in variants):
            columns[head] = [write(v[key]) if v.get(key) else "" for v in variants]
    rows = [list(row) for row in zip(*columns.values(), strict=True)]
    fillers = [""] * (len(columns) - 2)
    rows += [[f"baseline: {name}", metric.value(x), *fillers] for name, x in (data.get("baselines") or {}).items()]
    return ReportTable(list(columns), rows, title=title + (f", reference {data['reference']}" if tested else ""))


def _with_interval(metric: Metric, row: Mapping[str, Any], signed: bool = False) -> str:
    write = metric.difference if signed else metric.value
    return f"{write(row['mean'])} {metric.interval(row['low'], row['high'], signed)}".rstrip()


def _difference_cells(row: Mapping[str, Any], metric: Metric) -> list[str]:
    """The difference with its interval, and its p-values; empty for the reference."""
    if row["difference"] is None:
        return [""] * (1 + len(P_VALUES))
    return [_with_interval(metric, row["difference"], signed=True), *(short_p(row[key]) for key in P_VALUES.values())]
