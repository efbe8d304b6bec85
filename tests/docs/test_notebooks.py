"""The notebooks: what they show is what their cells print, and they are carried out by the slow tests."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import launch
import pytest
from docs.pages import PROJECT, TEXTS
from integrations.hosts import library

NOTEBOOKS = sorted((PROJECT / "docs" / "notebooks").glob("*.ipynb"))
NEEDS = {"gpt2_with_lora": "transformers peft", "grc_in_timm": "timm sklearn", "a_memory_of_your_own": "transformers"}
SHOWN = {
    "gpt2_with_lora": (r"carried (100|[89]\d)%\nemptied [1-4]\d%", "the memory is what answers"),
    "grc_in_timm": (r"plain [6-9]\d\.\d%, with GRC [6-9]\d\.\d%", "both have learned"),
    "a_memory_of_your_own": (r"with it (100|9\d)%, emptied before each segment [1-4]\d%", "it solves the task"),
    "inside_a_memory": (r"of the text: [1-4]\d%   of the exchanged state: (100|9\d)%", "answers follow the state"),
}
"""What each prints on any machine, as a pattern, and what that says."""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_whole_and_shows_what_it_says(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)], "run `make notebooks`"
    for cell in code:
        ast.parse("".join(cell["source"]))
    source = "\n".join("".join(cell["source"]) for cell in code)
    ours = source.index("from cached_transformers")
    assert all(found.start() > ours for found in re.finditer(r"^(import timm|from (transformers|peft))", source, re.M))
    printed = "".join(line for cell in code for output in cell["outputs"] for line in output["text"])
    assert re.search(SHOWN[path.stem][0], printed), SHOWN[path.stem][1]


def test_every_notebook_is_linked_and_held_to_something() -> None:
    assert {path.stem for path in NOTEBOOKS} == SHOWN.keys() >= NEEDS.keys()
    assert [path.name for path in NOTEBOOKS if f"(notebooks/{path.name})" not in TEXTS["docs/index.md"]] == []


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_carried_out(path: Path) -> None:
    for name in NEEDS.get(path.stem, "").split():
        library(name)
    printed = launch.python("-W", "ignore", PROJECT / "tools" / "notebooks.py", "--print", path)
    assert re.search(SHOWN[path.stem][0], printed), printed
