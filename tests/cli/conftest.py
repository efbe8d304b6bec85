"""Makes the stand-in data set and model importable, and a recipe of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    import standin

    path = tmp_path / "standin.yaml"
    path.write_text(yaml.safe_dump(standin.recipe()), encoding="utf-8")
    return str(path)
