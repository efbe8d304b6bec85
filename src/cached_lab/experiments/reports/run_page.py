"""The page of a run, and the tables of `cached evaluate` and `cached reproduce`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cached_lab.experiments.statistics import wilson_interval

from .blocks import Block, FactList, Folded, Heading, Paragraph, ReportTable, TableCell, TableRow
from .figures import curves, maps, paper
from .formatting import MISSING, Metric, environment_text, run_summary, short_count, short_seconds, unknown_words
from .page import pictured, titled, write_page
from .run_folder import Run, read_run
from .terminal import show

if TYPE_CHECKING:
    from rich.console import Console

GATES_CAPTION = (
    "Share sigma(lambda) that each head (a dot) gives to the memory; the rest goes to self-attention. Heads have no "
    "common order over seeds, so compare the means by layer (lines, with 95 % intervals over seeds)."
)
MAPS_CAPTION = (
    "Size of the output of self-attention and of the memory at each place, per layer. Each map has its own scale: "
    "compare places, not strengths."
)
PRECISIONS_CAPTION = (
    "Average precision in per cent, by pycocotools: AP over IoU thresholds from .50 to .95, AP50 and AP75 at one "
    "threshold; small objects are below 32 x 32 pixels, large ones from 96 x 96 on. A dash: there is no such object."
)
PRECISIONS = {
    "ap": "AP",
    "ap50": "AP50",
    "ap75": "AP75",
    "ap_small": "AP small",
    "ap_medium": "AP medium",
    "ap_large": "AP large",
}
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
Rows = Sequence[Mapping[str, Any]]


def write_run_report(run_folder: str | Path, summary: Mapping[str, Any] | None = None) -> Path:
    """Write `report.html` into a run folder; `summary` replaces the content of `summary.json`."""
    run = read_run(run_folder)
    if summary is not None:
        run = replace(run, summary=dict(summary))
    summary, metric = run.summary, Metric(run.metric)
    title = str(summary.get("name") or run.folder.resolve().name)
    environment = summary.get("environment") or {}
    about = {key: summary.get(key) for key in ("task", "variant", "seed", "steps")}
    about |= {"date": environment.get("date"), "environment": environment_text(environment)}
    blocks = [
        Heading(1, title),
        FactList(about),
        Paragraph(" ".join(run_summary(run.records, summary, metric)), "summary"),
        *_scores(summary, metric),
        *_average_precisions(summary),
        *learning_curves({run.name: [run.records]}, "curves", metric.name),
        *_evaluation(run.evaluation),
        *gates({run.name: [run.gates]} if run.gates else {}, "gates"),
        *feature_maps(run, "maps"),
        *(titled("Configuration", Folded("config.yaml", run.config)) if run.config else []),
    ]
    return write_page(run.folder, title, blocks)


def learning_curves(
    runs: Mapping[str, Sequence[curves.Records]], identifier: str, metric: str, reference: str | None = None
) -> list[Block]:
    """Curves of the records of each seed, by variant; empty before the first record."""
    try:
        drawn = curves.learning_curves(runs, metric, reference)
    except ValueError:
        return []
    several = any(len(seeds) > 1 for seeds in runs.values())
    caption = "Mean over seeds; the band runs from the lowest to the highest seed." if several else "One seed."
    return pictured("Learning curves", drawn, identifier, f"Learning curves of {', '.join(runs)}", caption)


def gates(shares: Mapping[str, Sequence[Any]], identifier: str) -> list[Block]:
    """Memory shares of each seed's layers, by variant; empty if no variant has gates."""
    if not shares:
        return []
    words = f"Memory share by layer and head of {', '.join(shares)}"
    drawn = paper.head_shares([paper.HeadShares(name, runs) for name, runs in shares.items()])
    return pictured("Gates", drawn, identifier, words, GATES_CAPTION)


def feature_maps(run: Run, identifier: str, name: str = "") -> list[Block]:
    """The feature maps of a run, under the name of its variant; empty if it has none."""
    found = run.feature_maps()
    if found is None:
        return []
    drawn = maps.feature_maps(found["image"], found["self"], found["memory"])
    words = "Images with the outputs of self-attention and of the memory, layer by layer"
    return pictured(f"Feature maps: {name}" if name else "Feature maps", drawn, identifier, words, MAPS_CAPTION)


def print_scores(title: str, rows: Rows, console: Console) -> None:
    """Print the scores of a run, a row (for detectors one for boxes and one for masks) per treatment of its memory."""
    if "box_ap" in rows[0]:
        kinds = [(row, kind) for row in rows for kind in ("box", "mask") if f"{kind}_ap" in row]
        cells = [[row["memory"], kind, *(_shown(row, f"{kind}_{part}") for part in PRECISIONS)] for row, kind in kinds]
        show(console, ReportTable(["memory", "kind", *PRECISIONS.values()], cells, title=title))
    else:
        show(console, _score_table(title, rows, "memory"))
    for name, value in rows[0].items():
        if name.endswith("_signature"):
            show(console, Paragraph(f"{name.removesuffix('_signature')}: {value}"))


def print_text_use(rows: Rows, about: Mapping[str, Any], console: Console) -> None:
    """Print unknown words, losses by place, and the use of the memory on a text.

    Args:
        rows: of `text_row`. about: of `about_text`.
    """
    lines = [unknown_words(about["unknown"])] if "unknown" in about else []
    if "use" in about:
        show(console, place_table(rows))
        lines += [reset_sentence(about["reset"])] if "reset" in about else []
        unasked = "whether the memory is used: --memory carry,shuffle"
        lines.append(unasked if about["use"] is None else use_sentence(about["use"]))
    show(console, *map(Paragraph, lines))


def print_output_cache(result: Mapping[str, Any], console: Console) -> None:
    """Print the scores without and with a cache over outputs (the result of `evaluate_output_cache`)."""
    title = f"{result['run']}: {result['split']} split, step {result['step']}"
    about = result["output_cache"]
    settings = " ".join(f"{about['name']}.{option}={value}" for option, value in about["options"].items())
    lines = [settings + (f"; a datastore of {about['entries']:,} entries" if "entries" in about else "")]
    if about["tuned"]:
        losses = about["validation"]
        found = f"loss {losses['without']:.4f} without and {losses['with']:.4f} with"
        lines.append(f"tuned on the validation split: {', '.join(about['tuned'])} ({found})")
        lines += [f"{option} is at the end of its candidates: set others by hand" for option in about["at_end"]]
    lines.append(", ".join(f"{part} {seconds:.1f} s" for part, seconds in about["seconds"].items()))
    show(console, _score_table(title, result["scores"], "output_cache"), *map(Paragraph, lines))


def print_sizes(sizes: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """Print the parameters or operations that were made equal, and the feed-forward width that makes them so."""
    operations = any("training_flops" in facts for facts in sizes.values())
    title = "operations of a forward pass in training, per row" if operations else "equal size"
    rows = []
    for name, facts in sizes.items():
        count = facts["training_flops" if operations else "matched_parameters"]
        equal = f"{facts['matched']} (ratio {facts['flops_ratio']:.4f})" if "matched" in facts else ""
        rows.append([name, f"{count:,}", str(facts["feed_forward"]), equal][: 4 if operations else 3])
    columns = ["variant", "operations" if operations else "parameters", "feed_forward", "equal to"]
    show(console, ReportTable(columns[: 4 if operations else 3], rows, title=title))


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
        mean, low, high = use["bits_per_byte"]
        words += f"; {LOSS.difference(mean)} bits per byte {LOSS.interval(low, high, signed=True)}"
    return words


def reset_sentence(reset: Mapping[str, Any]) -> str:
    """The worth of the row "reset", from `emptied_in_training`."""
    rows = f"in a share of {reset['reset_rows']:g} of the rows at each step (training.reset_rows)"
    ways = [rows] * bool(reset["reset_rows"]) + ["where a document begins (data.reset)"] * bool(reset["documents"])
    if ways:
        return f"reset: an empty memory; trained on: yes, {' and '.join(ways)}"
    return "reset: an empty memory; trained on: no (training.reset_rows=0), so that its loss is no measure of use"


def place_table(rows: Rows) -> ReportTable:
    """The loss at each quarter of a segment, and by the segments read before, a column per treatment of the memory.

    Args:
        rows: of `text_row`, with "memory". Beside "carry" and "shuffle" there is their difference.
    """
    modes = [row["memory"] for row in rows]
    pair = ["use"] if {"carry", "shuffle"} <= set(modes) else []
    lines = []
    for kind in ("quarters", "carried"):
        for parts in zip(*(row[kind] for row in rows), strict=True):
            loss = {mode: part["loss"] for mode, part in zip(modes, parts, strict=True)}
            cells = [_place(parts[0]), f"{parts[0]['tokens']:,}", *(f"{value:.4f}" for value in loss.values())]
            lines.append(cells + [LOSS.difference(loss["shuffle"] - loss["carry"]) for _ in pair])
    return ReportTable(["place", "tokens", *modes, *pair], lines, title="loss (nats) by place")


def _place(part: Mapping[str, Any]) -> str:
    if "quarter" in part:
        return f"quarter {part['quarter']} of the segment"
    first, last = part["from"], part["to"]
    return f"{first} segments read before" if first == last else f"{first:,} to {last:,} segments"


def _score_table(title: str, rows: Rows, names: str) -> ReportTable:
    columns = [name for name, value in rows[0].items() if isinstance(value, int | float) and name != names]
    headings = ["loss (nats)" if name == "loss" else name.replace("_", " ") for name in columns]
    cells = [[row[names], *(_shown(row, column) for column in columns)] for row in rows]
    return ReportTable([names.replace("_", " "), *headings], cells, title=title)


def _shown(row: Mapping[str, Any], column: str) -> str:
    """One score as text: shares in per cent, an accuracy with the interval of its rows."""
    value = row[column]
    if isinstance(value, int):
        return f"{value:,}"
    if math.isnan(value):
        return MISSING
    if not Metric(column).percent:
        return f"{value:.4f}"
    low, high = row.get(f"{column}_interval") or (None, None)
    return f"{value:.2%} {Metric(column).interval(low, high)}".rstrip()


def _average_precisions(summary: Mapping[str, Any]) -> list[Block]:
    """Average precision of boxes and masks; empty for a run of another task."""
    rows = []
    for label, key in list(SCORES.items())[:3]:
        values = summary.get(key) or {}
        for kind in ("box", "mask"):
            if f"{kind}_ap" in values:
                shown = [Metric(f"{kind}_{part}").value(values[f"{kind}_{part}"], unit=False) for part in PRECISIONS]
                rows.append([kind, *shown, f"{label}, step {values['step']:,}"])
    table = ReportTable(["", *PRECISIONS.values(), "at"], rows, PRECISIONS_CAPTION)
    return titled("Average precision", table) if rows else []


def _evaluation(evaluation: Mapping[str, Any]) -> list[Block]:
    """The loss by place in the document, and the accuracy by its length, of `cached evaluate`."""
    blocks: list[Block] = []
    scores, split = evaluation.get("scores", []), evaluation.get("split")
    places = {r["memory"]: [(p["from"], p["to"], p["loss"]) for p in r["places"]] for r in scores if r.get("places")}
    if places:
        text = f"Loss of the {split} tokens at these places of their documents, by treatment of the memory."
        text += f" Verdict: {use_sentence(evaluation['use'])}." if evaluation.get("use") else ""
        title = "Loss by place in the document"
        blocks += pictured(title, curves.loss_by_place(places), "places", title, text)
    lengths: dict[str, list[tuple[int, float, float, float]]] = {}
    for row in scores:
        if "segments" in row:
            lengths.setdefault(row["memory"], []).append((row["tokens"], row["accuracy"], *row["accuracy_interval"]))
    if lengths:
        title = "Accuracy by length of the document"
        text = (
            f"Share of {split} documents answered correctly, by treatment of the memory, with 95 % intervals for the "
        )
        text += "chance in sampling the documents."
        drawn = curves.accuracy_by_length({name: sorted(points) for name, points in lengths.items()})
        blocks += pictured(title, drawn, "lengths", title, text)
    return blocks


def _scores(summary: Mapping[str, Any], metric: Metric) -> list[Block]:
    found = {label: summary[key] for label, key in SCORES.items() if summary.get(key)}
    top5 = ["top5_accuracy"] if any("top5_accuracy" in values for values in found.values()) else []
    translated = [name for name in ("bleu", "chrf", "tokenised_bleu") if name in (summary.get("test") or {})]
    names = list(dict.fromkeys([metric.name, *top5, *translated, "loss"]))
    rows: list[TableRow] = []
    for label, values in found.items():
        shown = [
            TableCell(Metric(name).value(values.get(name)), _rows_interval(values, Metric(name))) for name in names
        ]
        step = values.get("step")
        rows.append([label, *shown, MISSING if step is None else f"{step:,}"])
    for name, value in (summary.get("baselines") or {}).items():
        rows.append([f"baseline: {name}", metric.value(value), *[MISSING] * len(names)])
    facts = {name: write(summary[key]) for name, (write, key) in COSTS.items() if summary.get(key) is not None}
    return [*([ReportTable(["", *names, "step"], rows)] if rows else []), FactList(facts)]


def _rows_interval(values: Mapping[str, Any], metric: Metric) -> str:
    """Wilson's 95 % interval of an accuracy from the scored rows, or the score's own interval; empty without one."""
    rows, value = values.get("rows"), values.get(metric.name)
    if f"{metric.name}_interval" in values and not metric.percent:
        return metric.interval(*values[f"{metric.name}_interval"])
    if not rows or value is None or not metric.percent:
        return ""
    interval = wilson_interval(round(value * rows), rows)
    return metric.interval(interval.low, interval.high)
