"""The floors of the house (`[tool.importlinter]` in pyproject.toml): imports go down, and never round in a circle."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]


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
