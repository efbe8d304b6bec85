"""Self-contained HTML pages: the blocks that a page is made of, and the file that becomes of them.

A page is a list of blocks, which say what is shown; `templates/blocks.html.j2` says how each is written, and
`templates/page.css` how it looks on a screen, a dark screen and paper. Jinja escapes whatever text a block holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from cached_transformers.files import write_whole

from .figures.style import COLOURS, inline_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE_NAME = "report.html"
TEMPLATES = Environment(
    loader=PackageLoader(__package__), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)


class Cell(NamedTuple):
    """A table cell: its text, a second line in small print, and a link or a colour mark where it has one."""

    text: str
    small: str = ""
    link: str = ""
    mark: str = ""


Row = Sequence[Cell | str]


@dataclass(frozen=True)
class Block:
    """Anything that stands on a page; its class chooses how the template writes it."""

    @property
    def kind(self) -> str:
        return type(self).__name__


@dataclass(frozen=True)
class Section(Block):
    """Blocks that belong together."""

    blocks: Sequence[Block]


@dataclass(frozen=True)
class Header(Block):
    """A title with a list of names and values below it; those that are None or empty are left out."""

    level: int
    title: str
    about: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Heading(Block):
    """A title."""

    level: int
    text: str


@dataclass(frozen=True)
class Facts(Block):
    """A list of names and values; those that are None or empty are left out."""

    pairs: Mapping[str, object]


@dataclass(frozen=True)
class Text(Block):
    """A paragraph of plain text, with a class of the style sheet where `style` names one."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Table(Block):
    """A table whose first column names the row and whose other columns are numbers, aligned right."""

    header: Sequence[str]
    rows: Iterable[Row]
    caption: str = ""


@dataclass(frozen=True)
class Picture(Block):
    """A figure (of `figures.style.inline_svg`) with its caption."""

    svg: Markup
    caption: str


@dataclass(frozen=True)
class Folded(Block):
    """Preformatted text behind a title that opens it."""

    title: str
    text: str


def titled(title: str, *blocks: Block) -> list[Block]:
    """Blocks below a heading of the third level."""
    return [Heading(3, title), *blocks]


def pictured(title: str, figure: Figure, identifier: str, words: str, caption: str) -> list[Block]:
    """A figure below a heading; `words` describe it to those who do not see it."""
    return titled(title, Picture(inline_svg(figure, identifier, words), caption))


def render(title: str, blocks: Iterable[Block]) -> str:
    """A whole HTML5 document with the style sheet inside."""
    return TEMPLATES.get_template("page.html.j2").render(title=title, blocks=blocks, colours=COLOURS) + "\n"


def write_page(folder: Path, title: str, blocks: Iterable[Block]) -> Path:
    """Write `report.html` into the folder, whole or not at all: a reader never meets half a report."""
    path = folder / FILE_NAME
    write_whole(path, render(title, blocks).encode())
    return path
