"""Rules about the files themselves: lengths, names, floors, and the recipes that an installation has."""

from __future__ import annotations

import importlib
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import cached_transformers
from cached_lab import resources
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


def test_public_names_exist_and_the_package_is_typed() -> None:
    names = [m.name for m in pkgutil.walk_packages(cached_transformers.__path__, "cached_transformers.")]
    modules = [importlib.import_module(n) for n in ["cached_transformers", *names] if not n.endswith("__main__")]
    missing = [f"{m.__name__}.{name}" for m in modules for name in getattr(m, "__all__", ()) if not hasattr(m, name)]
    assert missing == []
    repeated = [m.__name__ for m in modules if len(set(getattr(m, "__all__", ()))) != len(getattr(m, "__all__", ()))]
    assert repeated == []
    assert (Path(cached_transformers.__file__).parent / "py.typed").is_file()


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


def test_source_tree_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "src" / "cached_lab"
    (package / "recipes").mkdir(parents=True)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(resources, "_PACKAGE", package)
    monkeypatch.setattr(resources, "_PROJECT", tmp_path)
    assert resources.recipes_folder() == tmp_path / "recipes"


def test_installed_package_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "lib" / "site-packages" / "cached_lab"
    (package / "recipes").mkdir(parents=True)
    # A folder of the same name that belongs to something else.
    (tmp_path / "lib" / "recipes").mkdir()
    monkeypatch.setattr(resources, "_PACKAGE", package)
    monkeypatch.setattr(resources, "_PROJECT", tmp_path / "lib")
    assert resources.recipes_folder() == package / "recipes"


def test_without_recipes_the_message_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "_PACKAGE", tmp_path)
    monkeypatch.setattr(resources, "_PROJECT", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no recipes at .*; reinstall cached-transformers"):
        resources.recipes_folder()


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--config", folder / "pyproject.toml"]
    environ = {"PYTHONPATH": str(folder / "src"), "PATH": "", "COLUMNS": "200"}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)


def test_imports_go_down_and_never_in_a_circle() -> None:
    done = lint_imports(PROJECT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 kept, 0 broken" in done.stdout


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        ("cached_transformers/interfaces/capabilities.py", "import cached_transformers.layers", "floors"),
        ("cached_transformers/models/segments.py", "def later():\n    import cached_lab.data", "never imports the lab"),
        (
            "cached_transformers/memories/parts/fifo_store.py",
            "def later():\n    import cached_transformers.memories.rmt",
            "circles",
        ),
    ],
)
def test_what_would_break_the_floors_is_found(tmp_path: Path, file: str, line: str, broken: str) -> None:
    """An import inside a function is found, too."""
    shutil.copytree(PROJECT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PROJECT / "pyproject.toml", tmp_path)
    path = tmp_path / "src" / file
    path.write_text(path.read_text() + f"\n\n{line}\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1 and any(broken in row and "BROKEN" in row for row in done.stdout.splitlines())


def test_no_module_of_ours_is_imported_by_a_string() -> None:
    """importlib would hide an import from the linter; it is for optional packages, and for filling a room."""
    ours = [
        f"{path.relative_to(PROJECT)}: {line.strip()}"
        for path in (PROJECT / "src").rglob("*.py")
        if path.parts[-2:] != ("cli", "main.py")  # the commands beside it, below no other floor
        for line in path.read_text().splitlines()
        if "import_module(" in line and ("cached_transformers" in line or '"."' in line or "__package__" in line)
    ]
    assert ours == []
