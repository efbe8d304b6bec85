"""Write the records of `blocks` as one HTML page without other files."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from cached_transformers.files import write_whole

from .blocks import Block, FactList, Heading, Picture
from .figures.style import as_svg

PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ margin: 2rem auto; max-width: 68rem; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif; color: #24292f; }}
h2 {{ margin-top: 2.5rem; border-top: 1px solid #dfe3e8; padding-top: 1rem; }}
p, figcaption {{ max-width: 44rem; }} figcaption, caption, .note, dt, thead {{ color: #59636e; font-size: .85rem; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; font-size: .85rem; }}
dd {{ margin: 0; overflow-wrap: anywhere; }} div, figure {{ overflow-x: auto; margin: 1rem 0; }}
table {{ border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .3rem .6rem; border-bottom: 1px solid #dfe3e8; text-align: left; }} td + td {{ text-align: right; }}
svg {{ max-width: 100%; height: auto; }}
</style>
</head>
<body>
{body}
</body>
</html>
"""


def write_page(folder: Path, title: str, blocks: Iterable[Block]) -> Path:
    """Write `report.html` into the folder, in one atomic step."""
    path = folder / "report.html"
    write_whole(path, render(title, blocks).encode())
    return path


def render(title: str, blocks: Iterable[Block]) -> str:
    """A whole HTML5 document; all text but the pictures' SVG is escaped."""
    return PAGE.format(title=escape(title), body="\n".join(map(_html, blocks)))


def _html(block: Block) -> str:
    if isinstance(block, str):
        return f"<p>{escape(block)}</p>"
    if isinstance(block, Heading):
        return f"<h{block.level}>{escape(block.text)}</h{block.level}>"
    if isinstance(block, FactList):
        pairs = [f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in block.shown().items()]
        return f"<dl>{''.join(pairs)}</dl>"
    if isinstance(block, Picture):
        return f"<figure>{as_svg(block.figure)}<figcaption>{escape(block.caption)}</figcaption></figure>"
    head = "".join(f"<th>{escape(name)}</th>" for name in block.columns)
    cells = ([f"<td>{escape(cell)}</td>" for cell in row] for row in block.rows)
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    notes = f'<p class="note">{escape(block.notes)}</p>' if block.notes else ""
    caption = f"<caption>{escape(block.title)}</caption>" if block.title else ""
    return f"<div><table>{caption}\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>{notes}"
