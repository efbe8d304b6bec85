"""The page of a run, and the tables of `cached evaluate` and `cached reproduce`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .blocks import Block, FactList, Heading, Picture, ReportTable, Rows
from .figures.curves import Records, learning_curves
from .figures.paper import head_shares
from .formatting import MISSING, Metric, environment_text, short_count, short_seconds
from .page import write_page
from .run_folder import Run, read_json, read_run

GATES_CAPTION = (
    "Share sigma(lambda) that each head (a dot) gives to the memory; the rest goes to self-attention. Heads have no "
    "common order over seeds, so compare the means by layer (lines, with 95 % intervals over seeds)."
)
PRECISIONS = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
"""COCO's average precisions, as pycocotools measures them."""
SCORES = {"best on validation": "best", "at the end": "final", "test": "test", "test, last step": "test_last"}
"""Rows of the table of scores, and their keys in summary.json."""
COSTS = {
    "parameters": (short_count, "parameters"),
    "operations": (short_count, "flops"),
    "time per step": (short_seconds, "seconds_per_step"),
    "training time": (short_seconds, "train_seconds"),
}
VERDICTS = {
    "used": "the memory is used",
    "not shown": "no use of the memory can be shown",
    "harmful": "the memory is harmful",
}
LOSS = Metric("loss")


def write_run_report(folder: Path, summary: Mapping[str, Any] | None = None) -> Path:
    """Write `report.html` into a run folder; `summary` replaces the content of `summary.json`.

    Raises:
        ValueError: a file of the run is damaged.
    """
    run = read_run(folder)
    run = run if summary is None else run._replace(summary=dict(summary))
    try:
        blocks = run_blocks(run)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        files = "metrics.jsonl, summary.json, evaluation.json or gates.json"
        raise ValueError(f"{folder}: {files} is damaged ({error!r}); restore it, or repeat the run") from error
    return write_page(folder, str(run.summary.get("name") or folder.resolve().name), blocks)


def run_blocks(run: Run) -> list[Block]:
    """Circumstances, scores, curves, the evaluation and the gates of a run."""
    summary, last = run.summary, max((record["step"] for record in run.records), default=0)
    about = {key: summary.get(key) for key in ("task", "variant", "seed", "steps")}
    about |= {name: write(summary[key]) for name, (write, key) in COSTS.items() if key in summary}
    about |= {
        "skipped data files": summary.get("bad_files"),
        "environment": environment_text(summary.get("environment")),
    }
    scores = [{"score": name, **summary[key]} for name, key in SCORES.items() if summary.get(key)]
    baselines = (summary.get("baselines") or {}).items()
    rows = [*scores, *({"score": f"baseline: {name}", run.metric: value} for name, value in baselines)]
    single = "One run has no spread: a difference to another run may be chance."
    evaluation = read_json(run.folder / "evaluation.json")
    evaluated, split = evaluation.get("scores", []), evaluation.get("split")
    return [
        Heading(str(summary.get("name") or run.folder.resolve().name), 1),
        FactList(about),
        single if summary else f"The run is not finished: its last record is of step {last:,}.",
        *([score_table("scores", rows, "score")] if rows else []),
        *curves({run.name: [run.records]}, run.metric),
        *(evaluation_blocks(f"evaluation, {split} split", evaluated, evaluation) if evaluated else []),
        *gates({run.name: [run.gates]} if run.gates else {}),
    ]


def curves(runs: Mapping[str, Sequence[Records]], metric: str, reference: str | None = None) -> list[Block]:
    """Curves of the records of each seed, by variant; empty before the first record."""
    try:
        drawn = learning_curves(runs, metric, reference)
    except ValueError:
        return []
    caption = "Mean over seeds; the band runs from the lowest to the highest seed."
    return [Heading("Learning curves"), Picture(drawn, caption)]


def gates(shares: Mapping[str, Sequence[Any]]) -> list[Block]:
    """Memory shares of each seed's layers, by variant; empty if no variant has gates."""
    return [Heading("Gates"), Picture(head_shares(shares), GATES_CAPTION)] if shares else []


def evaluation_blocks(title: str, rows: Rows, about: Mapping[str, Any]) -> list[Block]:
    """Scores by treatment of the memory, and for text unknown words, losses by place, and the use of the memory.

    Args:
        rows: of `Evaluation.score`. about: its further facts, as in evaluation.json.
    """
    blocks: list[Block] = [score_table(title, rows, "memory")]
    signatures = {name: value for name, value in rows[0].items() if name.endswith("_signature")}
    blocks += [f"{name.removesuffix('_signature')}: {value}" for name, value in signatures.items()]
    blocks += [f"baseline: {name}, accuracy {value:.2%}" for name, value in (about.get("baselines") or {}).items()]
    if "unknown" in about:
        share, way = f"{about['unknown']:.2%} of the tokens", "which lowers the loss; compare with the same vocabulary"
        blocks.append(f"unknown words (<unk>): {share}, {way}")
    if "places" in rows[0]:
        blocks.append(place_table(rows))
    if "reset" in about:
        blocks.append(f"reset: an empty memory; trained on: {'yes' if about['reset']['trained_on'] else 'no'}")
    blocks += [about["efficiency"]] if "efficiency" in about else []
    if "use" in about:
        unasked = "whether the memory is used: --memory carry,shuffle"
        blocks.append(unasked if about["use"] is None else use_sentence(about["use"]))
    return blocks


def use_sentence(use: Mapping[str, Any]) -> str:
    """The verdict of `memory_use` with its numbers."""
    begin = VERDICTS[use["verdict"]]
    if not use["carried_tokens"]:
        return (
            f"{begin}: no segment follows another of its document, so that no memory is carried; take a shorter "
            "--segment-length, or data.reset=never"
        )
    mean, low, high = use["nats"]
    words = f"{begin}: shuffled, it changes the loss by {LOSS.difference(mean)} nats a token"
    if low is None:
        return f"{words}; a single one of {use['over']} gives no interval"
    words += f", 95 % interval {LOSS.interval(low, high, signed=True)} over {use['units']} {use['over']}"
    if "bits_per_byte" in use:
        words += f"; {LOSS.difference(use['bits_per_byte'][0])} bits per byte"
    return words


def place_table(rows: Rows) -> ReportTable:
    """The loss by quarter of a segment, segments read before, and place in the document; a column per treatment.

    Args:
        rows: of `text_row`, with "memory". Beside "carry" and "shuffle" there is their difference.
    """
    modes = [row["memory"] for row in rows]
    pair = ["use"] if {"carry", "shuffle"} <= set(modes) else []
    lines = []
    for kind in ("quarters", "carried", "places"):
        for parts in zip(*(row.get(kind, []) for row in rows), strict=True):
            loss = {mode: part["loss"] for mode, part in zip(modes, parts, strict=True)}
            cells = [_place(kind, parts[0]), f"{parts[0]['tokens']:,}", *(f"{value:.4f}" for value in loss.values())]
            lines.append(cells + [LOSS.difference(loss["shuffle"] - loss["carry"]) for _ in pair])
    return ReportTable(["place", "tokens", *modes, *pair], lines, title="loss (nats) by place")


def _place(kind: str, part: Mapping[str, Any]) -> str:
    if kind == "quarters":
        return f"quarter {part['quarter']} of the segment"
    first, last = part["from"], part["to"]
    if kind == "places":
        return f"tokens {first:,} to {last:,} of the document"
    return f"{first} segments read before" if first == last else f"{first:,} to {last:,} segments"


def score_table(title: str, rows: Rows, first: str) -> ReportTable:
    """All scores, a row per value of `first`; average precisions have a row for boxes and one for masks."""
    if any("box_ap" in row for row in rows):
        kinds = [(row, kind) for row in rows for kind in ("box", "mask") if f"{kind}_ap" in row]
        cells = [[row[first], kind, *(_shown(row, f"{kind}_{part}") for part in PRECISIONS)] for row, kind in kinds]
        heads = [f"AP{part[2:].replace('_', ' ')}" for part in PRECISIONS]
        return ReportTable([first, "kind", *heads], cells, title=f"{title}: Average precision")
    pairs = [(name, value) for row in rows for name, value in row.items() if name != first]
    columns = list(dict.fromkeys(n for n, value in pairs if isinstance(value, int | float) or n == "efficiency"))
    heads = ["loss (nats)" if name == "loss" else name.replace("_", " ") for name in columns]
    cells = [[row[first], *(_shown(row, column) for column in columns)] for row in rows]
    return ReportTable([first.replace("_", " "), *heads], cells, title=title)


def _shown(row: Mapping[str, Any], column: str) -> str:
    """One score as text: shares in per cent, an accuracy with the interval of its rows."""
    value, metric = row.get(column), Metric(column)
    if value is None or math.isnan(value):
        return MISSING
    shown = f"{value:,}" if isinstance(value, int) else f"{value:.2%}" if metric.percent else f"{value:.4f}"
    return f"{shown} {metric.interval(*(row.get(f'{column}_interval') or (None, None)))}".rstrip()
