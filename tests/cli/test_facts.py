"""Facts of registered parts: those in the file beside the code, and those registered elsewhere."""

from __future__ import annotations

import json

import pytest

from cached_lab import resources
from cached_lab.cli.main import main
from cached_lab.experiments.facts import as_text
from cached_transformers.registry import MEMORIES


def test_the_file_of_facts_is_current() -> None:
    assert resources.facts_file().read_text(encoding="utf-8") == as_text(), "run `make facts`"


@pytest.fixture
def elsewhere():
    """A memory that a user's code has registered in this process."""

    @MEMORIES.register("a_memory_from_elsewhere", cost="nothing", equations=["y = x", "z = y"])
    class Elsewhere:
        """Carries nothing."""

        needs = frozenset({"state", "context"})

        def __init__(self, width: int, ratio: float = 0.5, **rest: object) -> None: ...

    yield
    del MEMORIES._entries["a_memory_from_elsewhere"]


def test_parts_registered_in_this_process_are_listed_and_explained(elsewhere, capsys) -> None:
    assert main(["explain", "a_memory_from_elsewhere"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        *("a_memory_from_elsewhere (memory)", "Carries nothing.", "", "equations:", "  y = x", "  z = y"),
        *("", "cost:", "  nothing", "", "options:"),  # the model gives the width
        *("  ratio: float = 0.5", "  ... and all options of the wrapped library"),
    ]
    assert main(["list", "memories", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["memories"]}
    assert list(rows) == sorted(rows)
    assert rows["a_memory_from_elsewhere"] == {
        **{"name": "a_memory_from_elsewhere", "summary": "Carries nothing.", "paper": None},
        **{"insertion": "kv", "cost": "nothing", "reach": None},
    }


def test_without_the_file_the_message_says_what_to_do(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(resources, "_PACKAGE", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"facts\.json"):
        resources.read_facts()
