"""Records that reports are made of; `terminal`, `markdown` and `page` write them. A string is a paragraph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]
"""Numbers of several things by name, as in the JSON files."""


class ReportTable(NamedTuple):
    """A table; its first column names the row, the other columns hold numbers."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: str = ""
    title: str = ""


class Heading(NamedTuple):
    """A title; the page's own has level 1."""

    text: str
    level: int = 2


class FactList(NamedTuple):
    """Names and values; writers leave out values that are None or empty."""

    values: Mapping[str, object]

    def shown(self) -> dict[str, str]:
        """The values that are shown, as text."""
        return {name: str(value) for name, value in self.values.items() if value not in (None, "", {}, [])}


class Picture(NamedTuple):
    """A figure with its caption; for HTML only."""

    figure: Figure
    caption: str


Block = str | ReportTable | Heading | FactList | Picture
