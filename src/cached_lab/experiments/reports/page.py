"""Write the records of `blocks` as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from cached_transformers.files import write_whole

from .blocks import Block, FactList, Folded, Heading, Paragraph, Picture, ReportTable, TableCell
from .figures.style import COLOURS, inline_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE_NAME = "report.html"
PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
:root {{ color-scheme: light; {light} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{ color-scheme: dark; {dark} }} }}
{css}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def titled(title: str, *blocks: Block) -> list[Block]:
    """Blocks below a heading of the third level."""
    return [Heading(3, title), *blocks]


def pictured(title: str, figure: Figure, identifier: str, description: str, caption: str) -> list[Block]:
    """A figure below a heading; screen readers read the description."""
    return titled(title, Picture(inline_svg(figure, identifier, description), caption))


def render(title: str, blocks: Iterable[Block]) -> str:
    """A whole HTML5 document with its style sheet; all text but the pictures' SVG is escaped."""
    light, dark = (" ".join(f"--{name}: {pair[i]};" for name, pair in COLOURS.items()) for i in (0, 1))
    css = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    body = "\n".join(map(_html, blocks))
    return PAGE.format(title=escape(title), light=light, dark=dark, css=css, body=body)


def write_page(folder: Path, title: str, blocks: Iterable[Block]) -> Path:
    """Write `report.html` into the folder, in one atomic step."""
    path = folder / FILE_NAME
    write_whole(path, render(title, blocks).encode())
    return path


def _html(block: Block) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{escape(block.text)}</h{block.level}>"
    if isinstance(block, FactList):
        pairs = [f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in block.shown().items()]
        return f"<dl>{''.join(pairs)}</dl>" if pairs else ""
    if isinstance(block, Paragraph):
        return f'<p class="{escape(block.style)}">{escape(block.text)}</p>'
    if isinstance(block, Picture):
        return f'<figure><div class="scroll">{block.svg}</div><figcaption>{escape(block.caption)}</figcaption></figure>'
    if isinstance(block, Folded):
        return f"<details><summary>{escape(block.title)}</summary><pre>{escape(block.text)}</pre></details>"
    return _html_table(block)


def _html_table(table: ReportTable) -> str:
    first, *others = [f'<th scope="col">{escape(name)}</th>' for name in table.columns]
    head = first + "".join(others).replace("<th ", '<th class="number" ')
    rows = []
    for row in table.rows:
        name, *numbers = map(_html_cell, row)
        cells = "".join(f'<td class="number">{number}</td>' for number in numbers)
        rows.append(f'<tr><th scope="row">{name}</th>{cells}</tr>')
    # The notes stay in view while the table scrolls.
    notes = f'<p class="note">{escape(table.notes)}</p>' if table.notes else ""
    body = "\n".join(rows)
    return (
        f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>{notes}'
    )


def _html_cell(cell: TableCell | str) -> str:
    if isinstance(cell, str):
        return escape(cell)
    dot = f'<span class="dot" style="background: {escape(cell.mark)}"></span>' if cell.mark else ""
    text = f'<a href="{escape(cell.link)}">{escape(cell.text)}</a>' if cell.link else escape(cell.text)
    small = f"<small>{escape(cell.small)}</small>" if cell.small else ""
    return f"{dot}{text}{small}"
