"""All drills of this folder: every module that has a `DRILL` or, where one file serves several, `DRILLS`."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from .frame import Drill


def drills() -> list[Drill]:
    """Drills in order of their names."""
    found: list[Drill] = []
    for file in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if not file.name.startswith("_") and not file.name.startswith("test_"):
            module = importlib.import_module(f"{__package__}.{file.name}")
            found += [module.DRILL] if hasattr(module, "DRILL") else getattr(module, "DRILLS", [])
    return sorted(found, key=lambda drill: drill.name)
