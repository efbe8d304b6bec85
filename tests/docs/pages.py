"""What the README and the pages of the documentation tell people to type."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).resolve().parents[2]
FILES = [PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", *sorted((PROJECT / "docs").rglob("*.md"))]
TEXTS = {path.relative_to(PROJECT).as_posix(): path.read_text(encoding="utf-8") for path in FILES}
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\n+\Z")
PROMPT = re.compile(r"^\$ (.*)$", re.MULTILINE)
"""In a block of text, where answers stand beside commands."""


class Block(NamedTuple):
    """A fenced block. number: of those in its language on its page, from 1 on. line: the first of its text.
    not_run: reason of a comment `<!-- not run: reason -->` before it."""

    page: str
    language: str
    number: int
    line: int
    text: str
    not_run: str = ""

    @property
    def name(self) -> str:
        return f"{self.page}:{self.number}"


def blocks(*languages: str) -> Iterator[Block]:
    """The blocks in some languages, page by page."""
    for page, text in TEXTS.items():
        counts = dict.fromkeys(languages, 0)
        for found in BLOCK.finditer(text):
            if (language := found.group(2)) in counts:
                counts[language] += 1
                line = text.count("\n", 0, found.start(3)) + 1
                mark = NOT_RUN.search(text, 0, found.start())
                code = textwrap.dedent(found.group(3))
                yield Block(page, language, counts[language], line, code, mark.group(1) if mark else "")


def typed(text: str) -> Iterator[list[str]]:
    """The commands of lines of a shell as words, without comments, and without files behind < and >."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        found, words = iter([*lexer, ";"]), list[str]()
        for word in found:
            if word in ("<", ">"):
                next(found)
            elif word not in ("|", "&&", ";"):
                words.append(word)
            elif words:
                yield words
                words = []


def commands(program: str) -> Iterator[tuple[str, list[str]]]:
    """Page and words of every line of a shell that calls a program."""
    for block in blocks("bash", "console", "text"):
        text = "\n".join(PROMPT.findall(block.text)) if block.language == "text" else block.text
        yield from ((block.page, words) for words in typed(text) if words[0] == program)


def mentioned(program: str) -> Iterator[tuple[str, list[str]]]:
    """Page and words of what stands as `code` in a sentence and begins with a program."""
    for page, text in TEXTS.items():
        for code in re.findall(rf"`({re.escape(program)}\s[^`]+)`", BLOCK.sub("", text)):
            yield page, shlex.split(code)
