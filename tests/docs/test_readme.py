"""The Python examples of the README run, and the pages name what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cached_transformers.torchvision_guard import ensure_torchvision

README = Path(__file__).parents[2] / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize("source", EXAMPLES)
def test_example_runs(source: str) -> None:
    ensure_torchvision()
    exec(compile(source, "README.md", "exec"), {})


def test_linked_files_exist() -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)", README.read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (README.parent / link).exists()] == []


PAGES = [README, README.with_name("CONTRIBUTING.md"), *sorted(README.parent.joinpath("docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_files_and_modules_that_exist(page: Path) -> None:
    """Files by their path in the repository or in the package; modules where an example imports from them."""
    text = page.read_text(encoding="utf-8")
    root, package = README.parent, README.parent / "src" / "cached_transformers"
    files = re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|md|yaml))`", text)
    assert [name for name in files if not (root / name).exists() and not (package / name).exists()] == []
    modules = re.findall(r"^\s*(?:from|import) (cached_transformers[\w.]*)", text, re.MULTILINE)
    places = {name: root / "src" / name.replace(".", "/") for name in modules}
    assert [name for name, at in places.items() if not at.is_dir() and not at.with_suffix(".py").is_file()] == []
