"""Records that reports are made of; `terminal`, `markdown` and `page` write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

FactValues = Mapping[str, object]


class TableCell(NamedTuple):
    """A cell: its text, a second line in small print, and for HTML a link and the colour of a dot."""

    text: str
    small: str = ""
    link: str = ""
    mark: str = ""


TableRow = Sequence[TableCell | str]


@dataclass(frozen=True)
class ReportTable:
    """A table; its first column names the row, the other columns hold numbers."""

    columns: Sequence[str]
    rows: Sequence[TableRow]
    notes: str = ""
    title: str = ""

    def texts(self) -> list[list[str]]:
        """The cells as plain text, small print included."""
        return [[c if isinstance(c, str) else f"{c.text} {c.small}".strip() for c in row] for row in self.rows]


@dataclass(frozen=True)
class Heading:
    """A title."""

    level: int
    text: str


@dataclass(frozen=True)
class FactList:
    """Names and values; writers leave out values that are None or empty."""

    values: FactValues

    def shown(self) -> dict[str, str]:
        """The values that are shown, as text."""
        return {name: str(value) for name, value in self.values.items() if value not in (None, "", {}, [])}


@dataclass(frozen=True)
class Paragraph:
    """Plain text; `style` is a class of the style sheet."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Picture:
    """A figure as an SVG element (`figures.style.inline_svg`), with its caption; for HTML only."""

    svg: str
    caption: str


@dataclass(frozen=True)
class Folded:
    """Preformatted text that a click on the title opens; for HTML only."""

    title: str
    text: str


Block = ReportTable | Heading | FactList | Paragraph | Picture | Folded
