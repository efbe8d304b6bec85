"""Write the records of `blocks` as Markdown, and replace a part of a page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from cached_transformers.files import write_whole

from .blocks import Block, FactList, Heading, ReportTable


def to_markdown(blocks: Iterable[Block]) -> str:
    """All blocks but pictures; the fact "command" becomes a code block, and other text is escaped."""
    parts = []
    for block in blocks:
        if isinstance(block, str):
            parts.append(_text(block))
        elif isinstance(block, Heading):
            parts.append(f"{'#' * block.level} {_text(block.text)}")
        elif isinstance(block, FactList):
            facts = block.shown()
            parts.append(f"```bash\n{command}\n```" if (command := facts.pop("command", "")) else "")
            parts.append("; ".join(f"{_text(name)} {_text(value)}" for name, value in facts.items()))
        elif isinstance(block, ReportTable):
            title = f"**{_text(block.title)}**" if block.title else ""
            parts += [title, table(block.columns, block.rows), _text(block.notes)]
    return "\n\n".join(filter(None, parts)) + "\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as Markdown; HTML and bars in cells are escaped."""
    lines = [[_text(" ".join(cell.split())).replace("|", "\\|") for cell in line] for line in (header, *rows)]
    lines.insert(1, ["---"] * len(header))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _text(text: str) -> str:
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text)


def write_between(page: Path, marks: tuple[str, str], content: str) -> None:
    """Replace the part of a page between two lines (ValueError if the page lacks one of them)."""
    before, after = around(page, marks)
    write_whole(page, f"{before}{marks[0]}\n{content}\n{marks[1]}{after}".encode())


def around(page: Path, marks: tuple[str, str]) -> tuple[str, str]:
    """The text before and after the part between two lines (ValueError if the page lacks one of them)."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise ValueError(f"{page}: the lines {marks[0]!r} and {marks[1]!r} mark the part to write; add both")
    return before, after
