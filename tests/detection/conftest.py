"""Puts the made data within reach of the tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.importorskip("pycocotools")
pytest.importorskip("PIL")
