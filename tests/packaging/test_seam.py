"""The interfaces stay small in members and words, and docs/design/interfaces.md shows all of them."""

from __future__ import annotations

import re
from pathlib import Path

from cached_transformers.interfaces import capabilities, incremental, memory

PAGE = Path(__file__).resolve().parents[2] / "docs" / "design" / "interfaces.md"
PROTOCOLS = (memory.Memory, memory.LayerMemory, memory.ModelMemory)
RECORDS = (memory.Query, memory.Context, memory.Reading, memory.Trace, memory.Tokens, memory.Entry)


def members() -> dict[str, list[str]]:
    """Public names of the protocols of memories, and the fields of the records that pass between them and a layer."""
    found = {kind.__name__: [name for name in vars(kind) if not name.startswith("_")] for kind in PROTOCOLS}
    found["IncrementalRead"] = ["open", "advance"]  # and read or enter, which are counted above
    assert all(hasattr(incremental.IncrementalRead, name) for name in found["IncrementalRead"])
    return found | {kind.__name__: list(kind._fields) for kind in RECORDS}


def test_members_and_words_are_few_and_each_is_on_the_page() -> None:
    count = sum(map(len, members().values()))
    words = capabilities.CORE_WORDS | capabilities.PLACE_WORDS
    assert count <= 63 and len(words) <= 14
    assert sum(len(names) for kind, names in members().items() if kind in NOT_RECORDS) <= 23
    page = PAGE.read_text(encoding="utf-8")
    assert f"{count} members" in page
    assert [word for word in words if f"`{word}`" not in page] == []
    page = PAGE.read_text(encoding="utf-8")
    shown = page[page.index("## Interfaces") : page.index("### Capability words")]
    for kind, names in members().items():
        start = shown.index(f"class {kind}(") if f"class {kind}(" in shown else shown.index(f"\n{kind}(")
        part = shown[start + 1 :]
        text = part[: re.search(r"\n(?=class |\w+\(|core\(|```)", part).start()]  # type: ignore[union-attr]
        assert [name for name in names if not re.search(rf"\b{name}\b", text)] == [], kind


NOT_RECORDS = ("Memory", "LayerMemory", "ModelMemory", "IncrementalRead")
