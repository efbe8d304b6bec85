"""The tables of a comparison as Markdown, for a README or an issue: what `report.html` shows, without figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .cache_use_table import cache_use_table, legend
from .run_folder import Comparison, read_comparison
from .wording import P_VALUES, Metric, comparison_summary, difference_words, mean_of, pair_name, short_count

FILE_NAME = "compare.md"


def write_markdown(folder: str | Path) -> Path:
    """Write `compare.md` beside `compare.json`; returns its path."""
    path = Path(folder) / FILE_NAME
    path.write_text(comparison_markdown(read_comparison(folder)), encoding="utf-8")
    return path


def comparison_markdown(comparison: Comparison) -> str:
    """Scores of all variants and baselines, the differences of pairs, and the sentences that go with them."""
    metric, data, pairs = Metric(comparison.metric), comparison.data, comparison.pairs
    sentences = comparison_summary(
        comparison.statistics, comparison.reference, metric, comparison.split, comparison.baselines, pairs
    )
    parts = [
        f"# {comparison.title}",
        f"```bash\n{data['command']}\n```" if data.get("command") else "",
        _circumstances(data),
        _scores(comparison, metric),
        _pairs(pairs, metric) if pairs else "",
        "\n".join(f"- {sentence}" for sentence in sentences),
        _cache_use(comparison, metric),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _circumstances(data: Mapping[str, Any]) -> str:
    environment = data.get("environment") or {}
    commit = environment.get("commit")
    facts = {
        "seeds": ", ".join(map(str, data.get("seeds", []))),
        "torch": environment.get("torch"),
        "date": data.get("date"),
        "commit": commit[:7] if commit else None,
    }
    text = "; ".join(f"{key} {value}" for key, value in facts.items() if value)
    rows = f" By rows: Wilson's 95 % interval for {data['rows']:,} rows." if data.get("rows") else ""
    if not rows and any(variant.get("rows_interval") for variant in data.get("variants", [])):
        rows = " By rows: the mean of the runs' 95 % bootstrap intervals."
    return f"{text}. In brackets: 95 % t interval over seeds.{rows}"


def _scores(comparison: Comparison, metric: Metric) -> str:
    variants, paired, several = comparison.variants, bool(comparison.pairs), len(comparison.variants) > 2
    by_rows = any(variant.get("rows_interval") for variant in variants)
    training = any(variant.get("training_flops") for variant in variants)
    protocols = any(variant.get("protocol") for variant in variants)
    header = ["variant", f"{comparison.split} {metric.name}", *(["by rows"] if by_rows else [])]
    last = any(variant.get("last_values") for variant in variants)
    header += ["last step"] if last else []
    header += [] if paired else [f"difference to {comparison.reference}", *(P_VALUES if several else ["p"])]
    header += ["parameters", "operations", *(["operations in training"] if training else [])]
    header += ["protocol"] if protocols else []
    rows = []
    for variant, row in zip(variants, comparison.statistics, strict=True):
        cells = [row["name"], f"{metric.value(row['mean'])} {metric.interval(row['low'], row['high'])}"]
        cells += [metric.interval(*variant["rows_interval"])] if by_rows else []
        cells += [metric.value(mean_of(variant.get("last_values")))] if last else []
        cells += [] if paired else _difference(row, metric)[: 3 if several else 2]
        cells += [short_count(variant.get("parameters")), short_count(variant.get("flops"))]
        cells += [short_count(variant.get("training_flops"))] if training else []
        rows.append([*cells, *([str(variant.get("protocol", ""))] if protocols else [])])
    for name, value in comparison.baselines.items():
        rows.append([f"baseline: {name}", metric.value(value), *[""] * (len(header) - 2)])
    return table(header, rows)


def _pairs(pairs: Sequence[Mapping[str, Any]], metric: Metric) -> str:
    rows = [[pair_name(pair), *_difference(pair, metric)] for pair in pairs]
    return table(["pair", "difference", *P_VALUES], rows)


def _cache_use(comparison: Comparison, metric: Metric) -> str:
    if not comparison.cache_use:
        return ""
    header, lines = cache_use_table(comparison.cache_use, metric)
    return f"Use of the cache ({comparison.split} {metric.name}). {legend(header[1:])}\n\n{table(header, lines)}"


def _difference(row: Mapping[str, Any], metric: Metric) -> list[str]:
    """The difference with its interval, p, and p after Holm."""
    if row["difference"] is None:
        return ["", "", ""]
    words = difference_words(row, metric)
    return [f"{words.mean} {words.interval}", words.p, words.holm]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as Markdown; a bar in a cell stays one."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.strip().replace("|", "\\|") for cell in line) + " |" for line in lines)
