"""Hold the language of docstrings, comments, messages and pages to plain English.

Each construction has a ceiling per 10,000 words in the code and in the pages. A ceiling may be lowered, never raised.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
CODE_FOLDERS = ("src", "benchmarks", "examples", "tools")

FIRST_WORDS = frozenset(["what", "which", "whether", "who", "whom", "whatever", "whoever", "where", "how", "as", "of"])
"""Words that begin no docstring summary."""

CONSTRUCTIONS = {
    "what as a noun": r"\bwhat (?:is|are|was|it|the|an?)\b",
    "of which": r"\bof (?:which|whom|others)\b",
    "persons": r"\b(?:who(?:m|so)?ever|nobody|somebody|anybody)\b",
    "stands": r"\b(?:stands?|stood|standing)\b",
    "behind": r"\bbehind\b",
    "anew": r"\banew\b",
    "so many": r"\bso (?:many|much)\b",
    "in the place of": r"\bin the place of\b",
}
CEILINGS = {
    "code": {
        "what as a noun": 1.0,
        "of which": 0.8,
        "persons": 0.2,
        "stands": 0.3,
        "behind": 0.2,
        "anew": 0.1,
        "so many": 0.1,
        "in the place of": 0.1,
    },
    "pages": {
        "what as a noun": 2.0,
        "of which": 0.5,
        "persons": 0.3,
        "stands": 2.0,
        "behind": 0.1,
        "anew": 0.3,
        "so many": 0.1,
        "in the place of": 0.1,
    },
}
"""The most per 10,000 words; the aim is 2 for each, the level of timm and flash-linear-attention."""
SUMMARIES = 0
"""The most docstring summaries that begin with one of `FIRST_WORDS`."""


def python_files() -> list[Path]:
    return sorted(file for folder in CODE_FOLDERS for file in (PROJECT / folder).rglob("*.py"))


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield docstrings of modules, classes and functions, and strings that follow an assignment."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def messages(tree: ast.Module) -> Iterator[str]:
    """Yield the constant text of raised errors."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in node.exc.args:
                for part in ast.walk(argument):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str):
                        yield part.value


def comments(source: str) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")


def code_text() -> str:
    parts: list[str] = []
    for file in python_files():
        source = file.read_text(encoding="utf-8")
        tree = ast.parse(source)
        parts += [*docstrings(tree), *messages(tree), *comments(source)]
    return "\n".join(parts)


def prose(markdown: str) -> str:
    """Return Markdown without code blocks, code spans and link targets."""
    without_blocks = re.sub(r"^( *)```.*?^\1```", "", markdown, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`|\]\([^)]*\)", " ", without_blocks)


def pages_text() -> str:
    files = [*sorted((PROJECT / "docs").rglob("*.md")), *(PROJECT / name for name in ("README.md", "CHANGELOG.md"))]
    parts = [prose(file.read_text(encoding="utf-8")) for file in [*files, PROJECT / "CONTRIBUTING.md"]]
    for file in sorted((PROJECT / "docs").rglob("*.ipynb")):
        cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
        parts += [prose("".join(cell["source"])) for cell in cells if cell["cell_type"] == "markdown"]
    return "\n".join(parts)


def per_10_000_words(text: str) -> dict[str, float]:
    words = len(re.findall(r"[A-Za-z][\w'-]*", text))
    counts = {name: len(re.findall(form, text, re.IGNORECASE)) for name, form in CONSTRUCTIONS.items()}
    return {name: 10_000 * count / words for name, count in counts.items()}


@pytest.mark.parametrize("part", ["code", "pages"])
def test_no_construction_exceeds_its_ceiling(part: str) -> None:
    measured = per_10_000_words(code_text() if part == "code" else pages_text())
    exceeded = {name: round(rate, 1) for name, rate in measured.items() if rate > CEILINGS[part][name]}
    assert not exceeded, f"ceilings: {CEILINGS[part]}"


def test_summaries_and_constructions_are_held() -> None:
    found = [
        f"{file.relative_to(PROJECT)}: {text.strip().splitlines()[0]}"
        for file in python_files()
        for text in docstrings(ast.parse(file.read_text(encoding="utf-8")))
        if text.strip() and text.split()[0].strip("`'\",.").lower() in FIRST_WORDS
    ]
    assert len(found) <= SUMMARIES, "\n".join(found)
    text = "What is held stands behind the rows, of which nobody " + "knows " * 4 + "so many anew in the place of one"
    assert all(rate > 0 for rate in per_10_000_words(text).values())
    assert prose("a `what is` [b](what is)\n```\nwhat is\n```\n").split() == ["a", "[b"]
