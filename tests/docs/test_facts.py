"""The tables of the README and the pages say what the registrations say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

PROJECT = Path(__file__).parents[2]


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = _load(PROJECT / "tools" / "docs_facts.py")
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
    assert text == TOOL.current(page, text, TOOL.registry_facts()), f"{page} is not current; run `make facts`"


def test_a_table_keeps_its_order_and_new_rows_come_last() -> None:
    text = "a\n<!-- facts: table of memories -->| `plain` | old words |<!-- /facts -->\nb\n"
    filled = TOOL.fill(text, FACTS)
    rows = [line for line in filled.splitlines() if line.startswith("| `")]
    assert rows == [
        "| `plain` | [Made](https://github.com/a/b) | nothing |",
        r"| `made` | [Made](https://arxiv.org/abs/0000.00001) | one \| two |",
    ]
    assert filled.startswith("a\n") and filled.endswith("\nb\n") and TOOL.fill(filled, FACTS) == filled


def test_purposes_and_counts() -> None:
    text = "<!-- facts: purposes of memories --><!-- /facts --> of <!-- facts: papers of memories -->9<!-- /facts -->."
    filled = TOOL.fill(text, FACTS)
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
