"""The page of a run: its scores, learning curves, gates, feature maps and configuration.

A page asks nothing of the network and needs no other file. What it states is computed from the numbers beside it. The
parts that the page of a comparison has too are public here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cached_lab.experiments.statistics import wilson_interval

from .detection_table import average_precisions
from .figures import curves, gates_and_maps
from .formatting import MISSING, Metric, environment_text, run_summary, short_count, short_seconds
from .memory_use_table import use_sentence
from .page import Block, Cell, Facts, Folded, Header, Row, Table, Text, pictured, titled, write_page
from .run_folder import Run, read_run

GATES_CAPTION = (
    "Share sigma(lambda) that each head gives to the memory; the rest goes to self-attention. Numbers by head are of "
    "the first seed: heads have no common order over seeds, so only the means by layer are compared."
)
MAPS_CAPTION = (
    "Size of the output of self-attention and of the memory at each place, per layer. Each map has its own scale: "
    "compare places, not strengths."
)
SCORES = {"best on validation": "best", "at the end": "final", "test": "test", "test, last step": "test_last"}
"""Rows of the table of scores, and where summary.json has them."""


def write_run_report(run_folder: str | Path, summary: Mapping[str, Any] | None = None) -> Path:
    """Write `report.html` into a run folder; `summary` takes the place of what its `summary.json` holds."""
    run = read_run(run_folder)
    if summary is not None:
        run = replace(run, summary=dict(summary))
    summary, metric = run.summary, Metric(run.metric)
    title = str(summary.get("name") or run.folder.resolve().name)
    environment = summary.get("environment") or {}
    about = {key: summary.get(key) for key in ("task", "variant", "seed", "steps")}
    about |= {"date": environment.get("date"), "environment": environment_text(environment)}
    blocks = [
        Header(1, title, about),
        Text(" ".join(run_summary(run.records, summary, metric)), "summary"),
        *_scores(summary, metric),
        *average_precisions(summary),
        *learning_curves({run.name: [run.records]}, "curves", metric.name),
        *_places(run),
        *_lengths(run),
        *gates({run.name: [run.gates]} if run.gates else {}, "gates"),
        *feature_maps(run, "maps"),
        *(titled("Configuration", Folded("config.yaml", run.config)) if run.config else []),
    ]
    return write_page(run.folder, title, blocks)


def learning_curves(
    runs: Mapping[str, Sequence[curves.Records]], identifier: str, metric: str, reference: str | None = None
) -> list[Block]:
    """Curves of the records of each seed, by variant; nothing where nothing is recorded yet."""
    try:
        drawn = curves.learning_curves(runs, metric, reference)
    except ValueError:
        return []
    several = any(len(seeds) > 1 for seeds in runs.values())
    caption = "Mean over seeds; the band runs from the lowest to the highest seed." if several else "One seed."
    return pictured("Learning curves", drawn, identifier, f"Learning curves of {', '.join(runs)}", caption)


def gates(shares: Mapping[str, Sequence[Any]], identifier: str, reference: str | None = None) -> list[Block]:
    """Memory shares of each seed's layers, by variant; nothing where no variant has any."""
    if not shares:
        return []
    words = f"Memory share by layer and head of {', '.join(shares)}"
    return pictured("Gates", gates_and_maps.gates(shares, reference), identifier, words, GATES_CAPTION)


def feature_maps(run: Run, identifier: str, name: str = "") -> list[Block]:
    """Feature maps of a run that has them, under the name of its variant."""
    maps = run.feature_maps()
    if maps is None:
        return []
    drawn = gates_and_maps.feature_maps(maps["image"], maps["self"], maps["memory"])
    words = "Images with the outputs of self-attention and of the memory, layer by layer"
    return pictured(f"Feature maps: {name}" if name else "Feature maps", drawn, identifier, words, MAPS_CAPTION)


def _places(run: Run) -> list[Block]:
    evaluation = run.evaluation or {}
    scores = [row for row in evaluation.get("scores", []) if row.get("places")]
    if not scores:
        return []
    lines = {row["memory"]: [(p["from"], p["to"], p["loss"]) for p in row["places"]] for row in scores}
    title = "Loss by place in the document"
    split = evaluation.get("split")
    text = f"Loss of the {split} tokens at these places of their documents, by what rows keep of memory."
    if use := evaluation.get("use"):
        text += f" Verdict: {use_sentence(use)}."
    return pictured(title, curves.loss_by_place(lines), "places", title, text)


def _lengths(run: Run) -> list[Block]:
    evaluation = run.evaluation or {}
    lines: dict[str, list[tuple[int, float, float, float]]] = {}
    for row in evaluation.get("scores", []):
        if "segments" in row:
            point = (row["tokens"], row["accuracy"], *row["accuracy_interval"])
            lines.setdefault(row["memory"], []).append(point)
    if not lines:
        return []
    title = "Accuracy by length of the document"
    text = f"Documents of the {evaluation.get('split')} split answered rightly, by what rows keep of memory, with 95 % "
    text += "intervals for the chance in drawing them."
    drawn = curves.accuracy_by_length({name: sorted(points) for name, points in lines.items()})
    return pictured(title, drawn, "lengths", title, text)


def _scores(summary: Mapping[str, Any], metric: Metric) -> list[Block]:
    found = {label: summary[key] for label, key in SCORES.items() if summary.get(key)}
    top5 = ["top5_accuracy"] if any("top5_accuracy" in values for values in found.values()) else []
    translated = [name for name in ("bleu", "chrf", "tokenised_bleu") if name in (summary.get("test") or {})]
    names = list(dict.fromkeys([metric.name, *top5, *translated, "loss"]))
    rows: list[Row] = []
    for label, values in found.items():
        shown = [Cell(Metric(name).value(values.get(name)), rows_interval(values, Metric(name))) for name in names]
        step = values.get("step")
        rows.append([label, *shown, MISSING if step is None else f"{step:,}"])
    for name, value in (summary.get("baselines") or {}).items():
        rows.append([f"baseline: {name}", metric.value(value), *[MISSING] * len(names)])
    cost: dict[str, tuple[Callable[[float | None], str], str]] = {
        "parameters": (short_count, "parameters"),
        "operations": (short_count, "flops"),
        "time per step": (short_seconds, "seconds_per_step"),
        "training time": (short_seconds, "train_seconds"),
    }
    facts = Facts({name: write(summary[key]) for name, (write, key) in cost.items() if summary.get(key) is not None})
    return [Table(["", *names, "step"], rows), facts] if rows else [facts]


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
