"""Write the records of `blocks` to the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .blocks import Block, Heading, ReportTable

UNBOUNDED = 10_000
"""Characters of a line without a terminal."""


def open_console() -> Console:
    """Standard output; in a pipe or a file lines are as long as their text."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=UNBOUNDED)


def show(console: Console, *blocks: Block) -> None:
    """Print tables with their notes, headings and paragraphs; other blocks are left out."""
    for block in blocks:
        text = block if isinstance(block, str) else block.text if isinstance(block, Heading) else ""
        if isinstance(block, ReportTable):
            table = Table(title=Text(block.title), title_justify="left", box=None, header_style="bold")
            for index, name in enumerate(block.columns):
                table.add_column(Text(name), justify="right" if index else "left", overflow="fold")
            for row in block.rows:
                table.add_row(*map(Text, row))
            console.print(table)
            text = block.notes
        if text:
            console.print(f" {text}", markup=False, soft_wrap=True)
