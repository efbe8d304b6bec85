"""Every family with every memory that it takes, in all uses; `make support` writes what is found to docs/support.md.

Processes that share the families tell each other what they found by files in the folder SUPPORT_CELLS.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from integrations import family_checks as checks
from integrations import wrapped_checks as wrapped
from integrations.checkpoints import CHECKPOINTS, Checkpoint, remembers
from integrations.families import ALL, HYBRIDS, Family, families

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "support.md"
USES = ("train", "generate", "beams", "save", "compile", "checkpointing", "LoRA", "DDP", "FSDP2")
WRAPPED: dict[str, Callable[..., None]] = {
    **{"LoRA": wrapped.adapts, "DDP": wrapped.replicated, "FSDP2": wrapped.cut_up}
}
EACH = {"train": checks.trains, "save": checks.saves, "checkpointing": checks.checkpoints}
TEXT = {"generate": checks.generates, "beams": checks.searches}
DECODER: dict[str, Callable[..., None]] = {**EACH, **TEXT, **WRAPPED, "compile": checks.compiles}
SHARED: dict[str, Callable[..., None]] = {**EACH, **WRAPPED, "compile": checks.shared_compiles}
PAIR = SHARED | TEXT
CHECKPOINT = "real checkpoint"
"""The column of trained models in which closed gates changed nothing, a step trained the memory, and it was saved."""
SAID = {
    wrapped.FRAMES: "by SegmentLoop",
    "is incompatible with Mamba-based models": "not in PEFT on every layer",
    "does not support activation checkpointing": "not in transformers",
    "timm runs blocks again without the memory's state": "not with a state",
}
"""What a model cannot do, without a memory either or with one alone: part of its message, and the cell."""
_CELLS: dict[str, dict[str, str]] = {}


def found(family: Family, cells: dict[str, str]) -> None:
    _CELLS[family.name] = cells
    if folder := os.environ.get("SUPPORT_CELLS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{family.name}.json").write_text(json.dumps(cells), encoding="utf-8")


def all_found() -> dict[str, dict[str, str]]:
    files = Path(os.environ.get("SUPPORT_CELLS", "nowhere")).glob("*.json")
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files} | _CELLS


def uses(family: Family) -> dict[str, Callable[..., None]]:
    return {"decoders": DECODER, "encoder-decoders": PAIR}.get(family.kind, SHARED)


def memories(family: Family) -> tuple[dict[str, dict[str, Any]], dict[str, str], dict[str, str]]:
    """Those that the family takes, with what options some need, and why it does not take the others."""
    taken, masks, refused = {}, {}, {}
    if family.kind != "decoders":
        for name, spec in checks.BY_ROW.items():
            try:
                family.with_memory(spec)
                taken[name] = spec
            except ValueError as error:
                assert "docs/support.md" in str(error)
        return checks.SHARED | taken, {}, {}
    for name, spec in checks.STREAMS.items():
        try:
            family.with_memory(spec)
            taken[name] = spec
        except ValueError as error:
            if "spans the layers" in str(error) and family in HYBRIDS:
                refused[name] = str(error).split("; ")[1]
            elif name in checks.BESIDE:
                assert "needs context" in str(error)
                refused[name] = str(error).split("; ")[1]
            else:
                assert "needs bias" in str(error) and name in checks.CAUSAL
                taken[name], masks[name] = checks.CAUSAL[name], f"{name} with mask='causal'"
    return taken, masks, refused


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
        found(family, {"memories": f"none: {said}"})
        return
    taken, masks, refused = memories(family)
    tried = {use: {_try(family, check, spec) for spec in taken.values()} for use, check in uses(family).items()}
    cells = {use: " / ".join(sorted(answers)) for use, answers in tried.items()}
    names = [masks.get(name, name) for name in taken]
    why = [f"not {', '.join(n for n in refused if refused[n] == w)}: {w}" for w in dict.fromkeys(refused.values())]
    found(family, {"memories": "; ".join([", ".join(names), *why])} | cells)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=str)
def test_a_family_s_checkpoint(checkpoint: Checkpoint, tmp_path: Path) -> None:
    for memory in checkpoint.memories:
        remembers(checkpoint, memory, tmp_path / memory)
    if folder := os.environ.get("SUPPORT_CELLS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{checkpoint.name.replace('/', '-')}.tried").touch()


def checkpoints(family: Family, page: str) -> str:
    """Those that were tried, now or, where a package is not installed, when the page was written."""
    tried = {file.stem for file in Path(os.environ.get("SUPPORT_CELLS", "nowhere")).glob("*.tried")}
    of_it = [checkpoint.name for checkpoint in CHECKPOINTS if checkpoint.family == family.name]
    return ", ".join(name for name in of_it if name.replace("/", "-") in tried or name in page)


def test_the_table_is_what_was_found() -> None:
    """Runs behind the others; with SUPPORT_TABLE=write it is written."""
    missing = {family.name for family in ALL} - set(all_found())
    writes = os.environ.get("SUPPORT_TABLE") == "write"
    if missing and not writes:
        pytest.skip("not all families were tried in this process")
    assert not missing
    page = PAGE.read_text(encoding="utf-8")
    written = re.sub(r"(?s)(<!-- support -->\n).*?(<!-- end -->)", lambda m: m[1] + table(rows(page)) + m[2], page)
    if writes:
        PAGE.write_text(written, encoding="utf-8")
    assert page == written or writes, "docs/support.md is stale: make support"


def rows(page: str) -> dict[str, list[tuple[str, dict[str, str]]]]:
    """Families with their cells, by kind and in the order of their titles."""
    cells_of = {f.name: {**all_found()[f.name], CHECKPOINT: checkpoints(f, page)} for f in ALL}
    kinds = dict.fromkeys(family.kind for family in ALL)
    of_kind = {kind: sorted((f for f in ALL if f.kind == kind), key=lambda f: f.title.lower()) for kind in kinds}
    return {kind: [(family.title, cells_of[family.name]) for family in members] for kind, members in of_kind.items()}


def table(rows_by_kind: dict[str, list[tuple[str, dict[str, str]]]]) -> str:
    """Tables by kind. Lists of memories that several families share are numbered before the table."""
    lines = [
        "",
        f"**{CHECKPOINT}**: trained weights, left unchanged by closed gates, with a memory that trains and is saved.",
    ]
    for kind, rows in rows_by_kind.items():
        counts = Counter(cells["memories"] for _, cells in rows)
        shared = [memories for memories, count in counts.most_common() if count > 1]
        has = [use for use in USES if any(cells.get(use) for _, cells in rows)]
        lines += ["", f"## {kind[:1].upper()}{kind[1:]}", "", f"Uses: {', '.join(has)}.", ""]
        lines += [f"{number}. {memories}" for number, memories in enumerate(shared, start=1)]
        more = [CHECKPOINT] if any(cells[CHECKPOINT] for _, cells in rows) else []
        head = ["family", "memories", "uses", *more]
        lines += ["", f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
        for title, cells in rows:
            memories = cells["memories"]
            other = [f"{use} {cells[use]}" for use in has if cells.get(use, "yes") not in ("yes", "")]
            uses_of_it = "; ".join(["all others" if other else "all", *other]) if any(map(cells.get, has)) else ""
            numbered = f"({shared.index(memories) + 1})" if memories in shared else memories
            lines.append(f"| {' | '.join([title, numbered, uses_of_it, *(cells[column] for column in more)])} |")
    return "\n".join([*lines, "", ""])
