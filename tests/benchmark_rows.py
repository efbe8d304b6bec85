"""Run a benchmark by its command, and give its rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cached_lab.cli.main import main


def measured(name: str, folder: Path, *options: str) -> dict[str, Any]:
    """Run `cached benchmark NAME` for one round on the CPU; return the content of its JSON file."""
    path = folder / f"{name}.json"
    assert main(["benchmark", name, "--device", "cpu", "--rounds", "1", "--output", str(path), *options]) == 0
    assert path.with_suffix(".md").read_text().startswith(("|", "**"))
    found: dict[str, Any] = json.loads(path.read_text())
    return found
