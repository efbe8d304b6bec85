"""Help and lists come from the file of facts, without torch; what is built and read before a training."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Literal

import pytest
import torch
from common import refuses
from contract.contract_cases import CASES, Case

from cached_lab import resources
from cached_lab.cli.main import EXAMPLES, main
from cached_lab.experiments import build
from cached_lab.experiments.build import filled, refuse_what_cannot_be_built
from cached_lab.experiments.facts import as_text
from cached_lab.registries import LISTED
from cached_lab.tasks.recipes import load_config
from cached_transformers.docstrings import meanings, spelt_out
from cached_transformers.registry import ATTENTIONS, MEMORIES
from cached_transformers.torchvision_guard import ensure_torchvision

PROGRAM = """
import contextlib, io, sys
from cached_lab.cli.main import main
for words in {commands!r}:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as out, \\
            contextlib.redirect_stderr(io.StringIO()) as err:
        main(words)
    heavy = sorted({{"torch", "numpy", "timm", "transformers", "matplotlib", "scipy"}} & {{*sys.modules}})
    assert not heavy, (words, heavy)
    assert out.getvalue() or "unknown name" in err.getvalue(), words
from cached_lab.tasks.recipes import load_config
load_config("imagenet_pvt_tiny_grc")  # its model is registered by a module of the library that a recipe does not name
from cached_lab.experiments.probes.settings import chosen_memories, chosen_tasks
assert chosen_memories("grc_stream") == ["grc_stream"] and chosen_tasks("latch", {{}}, [])  # as `cached probe` begins
print("done")
"""


def test_without_torch() -> None:
    """One process runs all commands, so that the last check covers every import."""
    commands = [["--help"], ["--version"], ["list"], ["list", "recipes", "--json"], ["explain", "grc"]]
    commands += [["explain", "no_such_name"], *([command, "--help"] for command in EXAMPLES)]
    program = [sys.executable, "-c", PROGRAM.format(commands=commands)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_help_of_reproductions_names_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    from cached_lab.experiments.reproductions import MEASURED, REPRODUCTIONS

    with pytest.raises(SystemExit):
        main(["reproduce", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert all(f"{name}: {table.summary}" in said for name, table in REPRODUCTIONS.items())
    assert all(f"{name}: {summary}" in said for name, summary in MEASURED.items())


def test_the_file_of_facts_is_current_and_its_absence_is_named(tmp_path, monkeypatch) -> None:
    assert resources.facts_file().read_text(encoding="utf-8") == as_text(), "run `make facts`"
    monkeypatch.setattr(resources, "_PACKAGE", tmp_path)
    refuses(r"facts\.json", resources.read_facts, raises=FileNotFoundError)


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
    assert meanings(Part, ("own", "left", "right", "first", "third", "absent")) == {
        "own": "its own: with a colon.",
        "left": "of the branch, e.g. `first`. It goes on.",
        "right": "see `Base`.",
        "first": "of the base.",
        "third": "two of them.",
    }
    assert spelt_out("Kind | None", Part) == "Literal['a', 'b'] | None"
    assert spelt_out("dict[str, int]", Part) == "dict[str, int]"


def test_every_option_of_every_part_has_a_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    facts = resources.read_facts()
    options = [(part, line) for kind in LISTED for part in facts[kind] for line in part["options"]]
    named = [(part, line.partition(":")[0].partition(" ")[0]) for part, line in options]
    mute = [(part["name"], name) for part, name in named if part["meanings"].get(name, "see").startswith("see")]
    assert mute == []
    assert main(["explain", "grc"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index("  ratio: float = 0.5") + 1] == "      C / D."
    assert any(line.startswith("  candidate: Literal['norm', ") for line in lines)


@pytest.mark.parametrize(("name", "meant"), [("trian", "train"), ("explian", "explain")])
def test_a_command_with_a_slip_is_understood(name: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    refuses("2", main, [name], raises=SystemExit)
    assert f"did you mean {meant!r}?" in capsys.readouterr().err


ALONE = [case for case in CASES if case.attention == "softmax"]
ALONE += [Case("none", attention.name, "sequence_classifier") for attention in ATTENTIONS]


@pytest.mark.parametrize("case", ALONE, ids=lambda case: f"{case.memory}-{case.attention}-{case.model}")
def test_the_meta_device_takes_and_refuses_what_the_cpu_does(case: Case) -> None:
    refused = []
    for device in ("cpu", "meta"):
        try:
            with torch.device(device):
                model = case.build()
        except ValueError as error:
            refused.append(str(error))
        else:
            assert {tensor.device.type for tensor in model.parameters()} == {device}
    assert len(refused) in (0, 2) and len({*refused}) < 2


def test_data_are_read_only_where_something_is_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build_dataset", lambda *_: pytest.fail("the data were read"))
    sizes = ["model.image_size=8", "model.channels=1", "model.classes=10"]
    whole = load_config("digits_vit_plain", sizes)
    assert filled(whole) is whole
    refuse_what_cannot_be_built(whole)
    for size in sizes:
        with pytest.raises(pytest.fail.Exception, match="the data were read"):
            filled(load_config("digits_vit_plain", [other for other in sizes if other != size]))


def test_weights_to_begin_with_are_not_read(tmp_path) -> None:
    ensure_torchvision()
    pytest.importorskip("timm")
    recipe = load_config("coco_mini_mask_rcnn", [f"model.checkpoint={tmp_path / 'absent'}", "model.classes=3"])
    refuse_what_cannot_be_built(recipe)
