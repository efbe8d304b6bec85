"""Hold the size of every room. A ceiling may be lowered, never raised: a feature takes out as much as it adds."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]

LINES = {
    "src/cached_transformers": 37_989,
    "src/cached_transformers/interfaces": 986,
    "src/cached_transformers/state": 588,
    "src/cached_transformers/memories": 11_926,
    "src/cached_transformers/attentions": 6_918,
    "src/cached_transformers/layers": 3_043,
    "src/cached_transformers/models": 4_419,
    "src/cached_transformers/loops": 1_132,
    "src/cached_transformers/integrations": 7_232,
    "src/cached_lab": 22_867,
    "src/cached_lab/data": 1_581,
    "src/cached_lab/tasks": 6_809,
    "src/cached_lab/training": 3_144,
    "src/cached_lab/experiments": 9_400,
    "src/cached_lab/cli": 1_702,
    "benchmarks": 2_009,
    "examples": 373,
    "tests": 60_500,
}
"""The most lines of Python per folder."""
WORDS_OF_PAGES = 53_000
LONGEST_FILE = 500
REPEATED_CLASS_NAMES = 0


def python_files(folder: str) -> list[Path]:
    return sorted((PROJECT / folder).rglob("*.py"))


def lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize("folder", LINES)
def test_no_folder_grows(folder: str) -> None:
    assert sum(map(lines, python_files(folder))) <= LINES[folder]


def test_no_file_is_too_long() -> None:
    folders = ("src", "benchmarks", "examples", "tools")
    long = {str(file.relative_to(PROJECT)): lines(file) for folder in folders for file in python_files(folder)}
    assert not {name: count for name, count in long.items() if count > LONGEST_FILE}


def test_class_names_are_defined_once() -> None:
    names = Counter(
        node.name
        for file in python_files("src")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    repeated = {name: count for name, count in names.items() if count > 1}
    assert len(repeated) <= REPEATED_CLASS_NAMES, repeated


def test_pages_do_not_grow() -> None:
    pages = [*(PROJECT / "docs").rglob("*.md"), *(PROJECT / name for name in ("README.md", "CHANGELOG.md"))]
    assert sum(len(re.findall(r"\S+", page.read_text(encoding="utf-8"))) for page in pages) <= WORDS_OF_PAGES


def test_the_first_pages_are_short() -> None:
    assert len((PROJECT / "README.md").read_text(encoding="utf-8").splitlines()) <= 100
    assert len((PROJECT / "docs/architecture.md").read_text(encoding="utf-8").splitlines()) <= 130
