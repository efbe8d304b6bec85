"""Rules about the files themselves."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import cached_transformers
from cached_transformers import attentions, memories
from cached_transformers.registry import ATTENTIONS, MEMORIES, Registry

PROJECT = Path(__file__).resolve().parents[2]
# An absolute path of a user's machine; in a URL a host precedes the slash.
MACHINE_PATH = re.compile(r"(?<![\w.~$}])/(?:(?:work|root|farm)/|(?:home|Users|tmp)/\w)")


def tracked_files() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=PROJECT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in done.stdout.split("\0") if name and (path := PROJECT / name).is_file()]


@pytest.mark.parametrize("folder", ["src", "tests"])
def test_no_file_is_longer_than_500_lines(folder: str) -> None:
    lengths = {p.relative_to(PROJECT): len(p.read_text().splitlines()) for p in (PROJECT / folder).rglob("*.py")}
    assert lengths
    assert {path: length for path, length in lengths.items() if length > 500} == {}


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("data at /" + "work/shared", True),
        ("'/" + "root/venv'", True),
        ("cd /" + "tmp/clone", True),
        ("/" + "home/jane/data", True),
        ("https://example.org/work/page", False),
        ("tmp_path / 'work/' ", False),
        ("a/" + "tmp/b, the root/leaf ratio", False),
    ],
)
def test_machine_paths_are_recognised(text: str, matches: bool) -> None:
    assert bool(MACHINE_PATH.search(text)) is matches


def test_no_tracked_file_names_a_path_of_one_machine() -> None:
    found = []
    for path in tracked_files():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:  # an image or an array
            continue
        found += [f"{path}:{n}: {line}" for n, line in enumerate(lines, 1) if MACHINE_PATH.search(line)]
    assert found == []


def test_public_names_exist() -> None:
    names = [m.name for m in pkgutil.walk_packages(cached_transformers.__path__, "cached_transformers.")]
    modules = [importlib.import_module(n) for n in ["cached_transformers", *names] if not n.endswith("__main__")]
    missing = [f"{m.__name__}.{name}" for m in modules for name in getattr(m, "__all__", ()) if not hasattr(m, name)]
    assert missing == []
    repeated = [m.__name__ for m in modules if len(set(getattr(m, "__all__", ()))) != len(getattr(m, "__all__", ()))]
    assert repeated == []


ROOMS = [
    (memories, MEMORIES, {"title", "carries", "purpose", "equations", "state", "cost", "reach", "gradient"}),
    (attentions, ATTENTIONS, {"title", "purpose", "equation", "order", "cost"}),
]


@pytest.mark.parametrize(("room", "registry", "facts"), ROOMS)
def test_what_is_registered_is_exported_with_facts(room: ModuleType, registry: Registry[Any], facts: set[str]) -> None:
    ours = [e for e in registry if e.factory.__module__.startswith("cached_transformers.")]
    assert len(ours) > 1
    hidden = [e.name for e in ours if getattr(room, e.factory.__name__, None) is not e.factory]
    assert hidden == []
    assert [e.name for e in ours if e.factory.__name__ not in room.__all__] == []
    assert {e.name: facts - set(e.info) for e in ours if e.paper is None or facts - set(e.info)} == {}


def test_what_others_register_is_not_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MEMORIES, "_entries", dict(MEMORIES._entries))
    MEMORIES.register("of_a_user")(type("OfAUser", (), {}))
    found = MEMORIES.import_files(memories.__name__, memories.__path__)
    assert "OfAUser" not in found and found["TransformerXL"] is MEMORIES.entry("transformer_xl").factory


def test_package_is_marked_as_typed() -> None:
    assert (Path(cached_transformers.__file__).parent / "py.typed").is_file()
