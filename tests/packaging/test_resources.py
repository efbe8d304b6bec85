"""The folder of recipes."""

from __future__ import annotations

from pathlib import Path

import pytest

from cached_lab import resources


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
