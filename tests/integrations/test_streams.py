"""Memories with a state in decoders of transformers: one table of memories, one parametrised test of each property."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from integrations import family_checks as checks
from integrations.families import DECODERS, Family
from integrations.test_outside_memories import NAMES as OUTSIDE
from integrations.test_outside_memories import registered  # noqa: F401  (a fixture for every test)
from integrations.transformers_hosts import STREAMS

HOSTS = {family.name: family for family in DECODERS}
Case = tuple[Family, dict[str, Any]]
FIRST: dict[str, Case] = {
    f"{name}/{host}": (HOSTS[host], spec) for name, spec in STREAMS.items() for host in ("gpt2", "llama")
}
OTHERS: dict[str, Case] = {
    **{name: (HOSTS[name.split("/")[1]], spec) for name, spec in checks.RECENT.items()},
    **{f"{name}/kv": (HOSTS["llama"], spec) for name, spec in checks.KINDS.items()},
    **{f"{name}/{host}": (HOSTS[host], {"name": name}) for name in OUTSIDE for host in ("gpt2", "llama")},
    **{f"memory_transformer/{host}": (HOSTS[host], {"name": "memory_transformer"}) for host in ("gpt2", "llama")},
}
NOISY = "armt/llama"
"""The noise on its weights leaves no gradient for some."""


def each(check: Callable[..., None], cases: dict[str, Case]) -> list[Any]:
    return [pytest.param(check, *case, id=f"{check.__name__}-{name}") for name, case in cases.items()]


def some(*names: str) -> dict[str, Case]:
    return {name: (FIRST | OTHERS)[name] for name in names}


ALL = FIRST | OTHERS
ANY_PADDING = {name: case for name, case in ALL.items() if not name.startswith("outside_t")}
"""Those whose state at the end of a segment does not depend on the last column."""
SAMPLE = some("grc_stream/gpt2", "memorizing/llama", "rmt/gpt2", "armt/llama/mask", "infinity_former/kv")
PROPERTIES = [
    *each(checks.carries, ALL),
    *each(checks.rows_alone, ANY_PADDING),
    *each(checks.in_pieces, ANY_PADDING),
    *each(checks.searches, ALL),
    *each(checks.saves, ALL),
    *each(checks.trains, {name: case for name, case in ALL.items() if name != NOISY}),
    *each(checks.plain_again, FIRST | SAMPLE),
    *each(checks.moves_rows, FIRST | SAMPLE),
    *each(checks.hears_no_later_token, FIRST | SAMPLE),
    *each(checks.answers_alone, FIRST | SAMPLE),
    *each(checks.answers_by_beams, SAMPLE),
    *each(checks.answers_sampled, SAMPLE),
    *each(checks.generates, some("armt/gpt2", "infinity_former/kv", "crtn/kv", "outside_twice/llama")),
    *each(checks.checkpoints, some("armt/gpt2", "armt/llama", "crtn/kv", "compressive trained by the task/kv")),
]


@pytest.mark.parametrize("check, family, memory", PROPERTIES)
def test_a_memory_with_a_state(check: Callable[..., None], family: Family, memory: dict[str, Any]) -> None:
    check(family, memory)
