"""All drills of this folder: every module that has a `SUMMARY`."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from .frame import Drill, numbered


def drills() -> list[Drill]:
    """Drills in order of their names, each from the names of its module."""
    found: list[Drill] = []
    for file in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if not file.name.startswith(("_", "test_")):
            own = vars(importlib.import_module(f"{__package__}.{file.name}"))
            if "SUMMARY" in own:
                what = own["SUMMARY"], own.get("cases", numbered), own["attempt"], own["COUNT"], own["SAMPLE"]
                found.append(Drill(file.name, *what, own.get("prepare"), own.get("LIMIT", 60.0)))
    return sorted(found, key=lambda drill: drill.name)
