"""`cached explain` describes every option, from the docstrings only."""

from __future__ import annotations

from typing import Literal

import pytest

from cached_lab.cli.main import main
from cached_lab.registries import LISTED
from cached_lab.resources import read_facts
from cached_transformers.docstrings import meanings, spelt_out

Kind = Literal["a", "b"]


class Base:
    """A base.

    Args:
        first: of the base. second, third: two of them.
    """


class Branch:
    """Another.

    Args:
        left: of the branch, e.g. `first`.
            It goes on. right: see `Base`.
        first: of the branch.
    """


class Part(Base):
    """A part.

    Args:
        own: its own: with a colon.
        left, right: see `Branch`; more of it.

    Raises:
        ValueError: own: never.
    """


def test_meanings_come_from_the_class_and_from_those_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cached_transformers.docstrings._PACKAGE", __name__.partition(".")[0])
    found = meanings(Part, ("own", "left", "right", "first", "third", "absent"))
    assert found == {
        "own": "its own: with a colon.",
        "left": "of the branch, e.g. `first`. It goes on.",
        "right": "see `Base`.",
        "first": "of the base.",
        "third": "two of them.",
    }


def test_names_of_values_are_spelt_out() -> None:
    assert spelt_out("Kind | None", Part) == "Literal['a', 'b'] | None"
    assert spelt_out("dict[str, int]", Part) == "dict[str, int]"


def test_every_option_of_every_part_has_a_meaning() -> None:
    facts = read_facts()
    mute = [
        (kind, part["name"], option)
        for kind in LISTED
        for part in facts[kind]
        for option in (line.partition(":")[0].partition(" ")[0] for line in part["options"])
        if part["meanings"].get(option, "see").startswith("see")
    ]
    assert mute == []


def test_explain_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "grc"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("  ratio: float = 0.5")
    assert lines[at + 1] == "      C / D."
    assert any(line.startswith("  candidate: Literal['norm', ") for line in lines)


@pytest.mark.parametrize("name", ["trian", "explian"])
def test_a_command_with_a_slip_is_understood(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([name])
    assert stop.value.code == 2
    assert f"did you mean {'train' if name == 'trian' else 'explain'!r}?" in capsys.readouterr().err
