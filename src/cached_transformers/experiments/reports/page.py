"""Self-contained HTML pages: escaping, tables, figures, and one style sheet for screen, dark screen and paper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from .style import css_variables

STYLE = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--surface); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
main { max-width: 68rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; margin: 3rem 0 .75rem; padding-top: 1.25rem; border-top: 1px solid var(--grid); }
h3 { font-size: 1.02rem; margin: 2rem 0 .5rem; }
p { max-width: 44rem; margin: .5rem 0; }
a { color: var(--c1); }
.summary { font-size: 1.05rem; margin: 1.25rem 0; }
.note, figcaption { color: var(--muted); font-size: .85rem; text-align: left; max-width: 44rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: .75rem 0; font-size: .88rem; }
dt { color: var(--muted); } dd { margin: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; min-width: 100%; }
th, td { padding: .4rem .6rem; border-bottom: 1px solid var(--grid); text-align: left; white-space: nowrap;
  vertical-align: top; }
thead th { color: var(--muted); font-weight: 600; border-bottom: 1px solid var(--muted); vertical-align: bottom; }
tbody th { font-weight: 600; }
.number { text-align: right; }
td small { display: block; color: var(--muted); font-size: .8rem; }
.dot { display: inline-block; width: .65rem; height: .65rem; border-radius: 50%; margin-right: .5rem; }
figure { margin: .75rem 0 1.5rem; }
figure svg { display: block; width: 100%; height: auto; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
figure svg text { font-family: inherit !important; }
details { margin: .5rem 0; } summary { cursor: pointer; color: var(--muted); }
pre { overflow-x: auto; padding: .9rem 1rem; border: 1px solid var(--grid); border-radius: 6px; font-size: .8rem;
  line-height: 1.45; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
@media print { main { max-width: none; padding: 0; } figure, tr { break-inside: avoid; } h2 { break-after: avoid; }
  .scroll { overflow: visible; } table { font-size: .7rem; } th, td { white-space: normal; padding: .3rem .4rem; } }
"""


class Cell(NamedTuple):
    """A table cell: its text, a second line in small print, and a link or a colour mark where it has one."""

    text: str
    small: str = ""
    link: str = ""
    mark: str = ""


def page(title: str, body: str) -> str:
    """A whole HTML5 document with the style sheet inside."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>\n{css_variables()}{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def facts(pairs: Mapping[str, object]) -> str:
    """A list of names and values; entries that are None or empty are left out."""
    rows = [f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in pairs.items() if v not in (None, "", {}, [])]
    return f"<dl>{''.join(rows)}</dl>" if rows else ""


def table(header: Sequence[str], rows: Iterable[Sequence[Cell | str]], caption: str = "") -> str:
    """A table whose first column names the row and whose other columns are numbers, aligned right."""
    head = "".join(f'<th scope="col"{_number(i)}>{escape(text)}</th>' for i, text in enumerate(header))
    body = "\n".join("<tr>" + "".join(_cell(i, cell) for i, cell in enumerate(row)) + "</tr>" for row in rows)
    note = paragraph(caption, "note") if caption else ""  # outside the table: it stays in view where the table scrolls
    return f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>{note}'


def figure(svg: str, caption: str) -> str:
    """A figure with its caption."""
    return f'<figure><div class="scroll">{svg}</div><figcaption>{escape(caption)}</figcaption></figure>'


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of plain text, with a class of the style sheet where `kind` names one."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def collapsible(title: str, text: str) -> str:
    """Preformatted text behind a title that opens it."""
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def environment_text(environment: Mapping[str, Any] | None) -> str:
    """The environment of a run in one line: `torch 2.7, python 3.12, ...`; its date has a line of its own."""
    shown = {key: value for key, value in (environment or {}).items() if key != "date" and value not in (None, "")}
    return ", ".join(f"{key} {value}" for key, value in shown.items())


def write_page(path: Path, text: str) -> Path:
    """Write a page whole or not at all: a reader never meets half a report."""
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
    return path


def _number(column: int) -> str:
    return ' class="number"' if column else ""


def _cell(column: int, cell: Cell | str) -> str:
    cell = Cell(cell) if isinstance(cell, str) else cell
    text = escape(cell.text)
    if cell.link:
        text = f'<a href="{escape(cell.link)}">{text}</a>'
    if cell.mark:
        text = f'<span class="dot" style="background: {escape(cell.mark)}"></span>{text}'
    if cell.small:
        text += f"<small>{escape(cell.small)}</small>"
    return f'<th scope="row">{text}</th>' if column == 0 else f'<td class="number">{text}</td>'
