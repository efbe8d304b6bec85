"""Every family with every memory that it takes, in all uses; `make support` writes what is found to docs/support.md."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from integrations import family_checks as checks
from integrations.families import ALL, Family, families

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "support.md"
USES = ("train", "generate", "beams", "save", "compile", "checkpointing")
DECODER: dict[str, Callable[..., None]] = {
    **{"train": checks.trains, "generate": checks.generates, "beams": checks.searches},
    **{"save": checks.saves, "compile": checks.compiles, "checkpointing": checks.checkpoints},
}
SHARED: dict[str, Callable[..., None]] = {
    **{"train": checks.shared_trains, "save": checks.shared_saves},
    **{"compile": checks.shared_compiles, "checkpointing": checks.shared_checkpoints},
}
PAIR = SHARED | {"generate": checks.shared_generates, "beams": checks.shared_searches}
SAID = {
    "does not support activation checkpointing": "not in transformers",
    "timm runs blocks again without the state": "not with a state",
}
"""What a model cannot do, without a memory either or with one alone: part of its message, and the cell."""
_CELLS: dict[str, dict[str, str]] = {}


def uses(family: Family) -> dict[str, Callable[..., None]]:
    return {"decoders": DECODER, "encoder-decoders": PAIR}.get(family.kind, SHARED)


def memories(family: Family) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Those that the family takes, and why it does not take the others."""
    taken, refused = {}, {}
    if family.kind != "decoders":
        for name, spec in checks.BY_ROW.items():
            try:
                family.with_memory(spec)
                taken[name] = spec
            except ValueError as error:
                assert "memories that work here: 'attention_cache'" in str(error)
        return checks.SHARED | taken, {}
    for name, spec in checks.STREAMS.items():
        try:
            family.with_memory(spec)
            taken[name] = spec
        except ValueError as error:
            assert "needs bias" in str(error) and name in checks.CAUSAL
            taken[name], refused[name] = checks.CAUSAL[name], f"{name} with mask='causal'"
    return taken, refused


def _try(family: Family, check: Callable[..., None], spec: dict[str, Any]) -> str:
    """What stands in the cell."""
    try:
        check(family, spec)
    except ValueError as error:
        reason = next((cell for part, cell in SAID.items() if part in str(error)), None)
        if reason is None:
            raise
        return reason
    return "yes"


@families(ALL)
def test_a_family(family: Family) -> None:
    if family.refused:
        with pytest.raises(ValueError, match=family.refused) as refusal:
            family.with_memory("grc")
        said = re.sub(r"^\w+ takes no memory: ", "", str(refusal.value)).split(";")[0]
        _CELLS[family.name] = {"memories": f"none: {said}"}
        return
    taken, masks = memories(family)
    found = {use: {_try(family, check, spec) for spec in taken.values()} for use, check in uses(family).items()}
    cells = {use: " / ".join(sorted(answers)) for use, answers in found.items()}
    names = [masks.get(name, name) for name in taken]
    _CELLS[family.name] = {"memories": ", ".join(names)} | cells


def test_the_table_is_what_was_found() -> None:
    """Runs behind the others; with SUPPORT_TABLE=write it is written."""
    if set(_CELLS) != {family.name for family in ALL}:
        pytest.skip("not all families were tried in this process")
    page = PAGE.read_text(encoding="utf-8")
    written = re.sub(r"(?s)(<!-- support -->\n).*?(<!-- end -->)", lambda m: m[1] + table() + m[2], page)
    if os.environ.get("SUPPORT_TABLE") == "write":
        PAGE.write_text(written, encoding="utf-8")
    assert page == written or os.environ.get("SUPPORT_TABLE") == "write", "docs/support.md is stale: make support"


def table() -> str:
    lines = []
    for kind in dict.fromkeys(family.kind for family in ALL):
        lines += ["", f"## {kind[:1].upper()}{kind[1:]}", "", f"| family | memories | {' | '.join(USES)} |"]
        lines += ["| --- " * (2 + len(USES)) + "|"]
        for family in sorted((f for f in ALL if f.kind == kind), key=lambda f: f.title.lower()):
            cells = _CELLS[family.name]
            row = [family.title, cells["memories"], *(cells.get(use, "") for use in USES)]
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join([*lines, "", ""])
