"""The Python examples of the README run."""

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
