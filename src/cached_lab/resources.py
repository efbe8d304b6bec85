"""Files that come with the package but are not code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


def facts_file() -> Path:
    """Return the file with the facts of registered parts, written by `make facts`."""
    return _PACKAGE / "facts.json"


def read_facts() -> dict[str, list[dict[str, Any]]]:
    """Return the facts of the package's parts by kind, sorted by name, without importing torch.

    Returns:
        `Registration.facts` for each kind in `LISTED`; "reproductions" with "name" and "summary".

    Raises:
        FileNotFoundError: the file is missing.
    """
    path = facts_file()
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; reinstall cached-transformers, or run `make facts` in its source")
    facts: dict[str, list[dict[str, Any]]] = json.loads(path.read_text(encoding="utf-8"))
    return facts
