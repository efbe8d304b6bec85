"""Files that come with the package but are not code."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_PROJECT = _PACKAGE.parents[1]


def recipes_folder() -> Path:
    """The folder of recipes: the one of the source tree when the package runs from it, else the installed copy.

    Raises:
        FileNotFoundError: the installation holds no recipes.
    """
    in_source = (_PROJECT / "pyproject.toml").is_file()
    folder = _PROJECT / "recipes" if in_source else _PACKAGE / "recipes"
    if not folder.is_dir():
        raise FileNotFoundError(f"no recipes at {folder}; reinstall cached-transformers, or give the path of a recipe")
    return folder
