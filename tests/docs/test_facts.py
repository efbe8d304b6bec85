"""Tables of the README and the pages say what the registrations say; notebooks show what they print."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import launch
import pytest
from docs.pages import PROJECT, TEXTS
from integrations.hosts import library

from cached_lab.experiments.pretrained import located


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = _load(PROJECT / "tools" / "docs_facts.py")
registry_facts = functools.cache(TOOL.registry_facts)
MADE = {
    "name": "made",
    "summary": "Made for a test.",
    "paper": "arXiv:0000.00001 (control)",
    "info": {"title": "Made", "carries": "one | two", "purpose": ["old", "new"], "order": "N", "equation": "y = x"},
    "stated": {"can": ["bias", "bidirectional", "causal"]},
}
PLAIN = MADE | dict(name="plain", paper="github.com/a/b", info=MADE["info"] | dict(carries="nothing", purpose="old"))
FACTS = {"memories": [MADE, PLAIN], "attentions": [MADE]}


@pytest.mark.parametrize("page", TOOL.PAGES)
def test_pages_are_current(page: str) -> None:
    text = (PROJECT / page).read_text(encoding="utf-8")
    assert "<!-- facts: " in text
    assert text == TOOL.current(page, text, registry_facts()), f"{page} is not current; run `make facts`"


def test_a_table_keeps_its_order_and_counts_are_words() -> None:
    text = "a\n<!-- facts: table of memories -->| `plain` | old words |<!-- /facts -->\nb\n"
    filled = TOOL.fill(text, FACTS)
    rows = [line for line in filled.splitlines() if line.startswith("| `")]
    assert rows == [
        "| `plain` | [Made](https://github.com/a/b) | nothing |",
        r"| `made` | [Made](https://arxiv.org/abs/0000.00001) | one \| two |",
    ]
    assert filled.startswith("a\n") and filled.endswith("\nb\n") and TOOL.fill(filled, FACTS) == filled
    text = (
        "<!-- facts: purposes of attentions --><!-- /facts --> by <!-- facts: papers of memories -->9<!-- /facts -->."
    )
    filled = TOOL.fill(text, FACTS | {"attentions": [MADE, PLAIN]})
    assert "| old | [made](#made), [plain](#plain) |\n| new | [made](#made) |" in filled
    assert filled.endswith("-->two<!-- /facts -->.")


def test_a_part_without_a_section_gets_one_with_its_facts_and_its_picture() -> None:
    page = TOOL.current("docs/attentions.md", "# Attentions\n", FACTS)
    assert (
        "## made\n\n<!-- facts: attention made -->\n\n[Made](https://arxiv.org/abs/0000.00001). Made for a test.\n"
        in page
    )
    assert "- **Equation**: `y = x`\n- **Order**: N\n- **Can**: causal, bias\n" in page
    assert "cached explain made --plot docs/images/attentions/made.png" in page
    assert TOOL.current("docs/attentions.md", page, FACTS) == page and TOOL.current("README.md", "#\n", FACTS) == "#\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- facts: table of models --><!-- /facts -->", "'table of models'"),
        ("<!-- facts: memory gone --><!-- /facts -->", "'gone'"),
        ("a\n<!-- facts: papers of memories -->9<!-- /facts --> b", "begins a line"),
        ("<!-- facts: memory made -->", "1 begin and 0 end"),
    ],
)
def test_what_cannot_be_filled_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TOOL.fill(text, FACTS)


NOTEBOOKS = sorted((PROJECT / "docs" / "notebooks").glob("*.ipynb"))
NEEDS = {"smollm2_with_a_memory": "gguf", "grc_in_timm": "timm sklearn", "a_memory_of_your_own": "transformers"}
SHOWN = {
    "smollm2_with_a_memory": (r"MiB: (?!.*71432).*\nblock_retrieval, 13\d MiB: *71432", "the key is retrieved"),
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
    if path.stem.startswith("smollm2"):
        try:
            located("smollm2")
        except ValueError as missing:
            pytest.skip(str(missing))
    printed = launch.python("-W", "ignore", PROJECT / "tools" / "notebooks.py", "--print", path)
    assert re.search(SHOWN[path.stem][0], printed), printed
