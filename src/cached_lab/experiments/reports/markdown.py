"""The tables of a comparison as Markdown, for a README or an issue: what `report.html` shows, without figures.

And what every table in Markdown needs: rows and bars, and the part of a page that a command writes again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cached_transformers.files import write_whole

from .cache_use_table import cache_use_table, legend
from .formatting import P_VALUES, Metric, comparison_summary, pair_name
from .run_folder import Comparison, read_comparison
from .variant_table import BY_ROWS, COSTS, baseline_rows, difference_cells, variant_columns

FILE_NAME = "compare.md"


def write_markdown(folder: str | Path) -> Path:
    """Write `compare.md` beside `compare.json`; returns its path."""
    path = Path(folder) / FILE_NAME
    write_whole(path, comparison_markdown(read_comparison(folder)).encode())
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
    columns = variant_columns(comparison, metric, missing="")
    del columns["time per step"]
    header = ["by rows" if head == BY_ROWS else head for head in columns]
    rows = [
        [cell.text if head in COSTS else f"{cell.text} {cell.small}" for head, cell in zip(columns, row, strict=True)]
        for row in zip(*columns.values(), strict=True)
    ]
    return table(header, [*rows, *baseline_rows(comparison, metric, [""] * (len(header) - 2))])


def _pairs(pairs: Sequence[Mapping[str, Any]], metric: Metric) -> str:
    rows = [
        [pair_name(pair), *(f"{cell.text} {cell.small}" for cell in difference_cells(pair, metric))] for pair in pairs
    ]
    return table(["pair", "difference", *P_VALUES], rows)


def _cache_use(comparison: Comparison, metric: Metric) -> str:
    if not comparison.cache_use:
        return ""
    header, lines = cache_use_table(comparison.cache_use, metric)
    return f"Use of the cache ({comparison.split} {metric.name}). {legend(header[1:])}\n\n{table(header, lines)}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as Markdown; a bar in a cell stays one."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.strip().replace("|", "\\|") for cell in line) + " |" for line in lines)


def write_between(page: Path, marks: tuple[str, str], content: str) -> None:
    """Write the part of a page between two lines again.

    Raises:
        ValueError: the page has no such lines.
    """
    before, after = around(page, marks)
    write_whole(page, f"{before}{marks[0]}\n{content}\n{marks[1]}{after}".encode())


def around(page: Path, marks: tuple[str, str]) -> tuple[str, str]:
    """What stands before and behind the part of a page between two lines (ValueError where it has no such lines)."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise ValueError(f"{page} has no part between {marks[0]!r} and {marks[1]!r}; put both lines where it goes")
    return before, after
