"""Fixtures of the data tests: every test has a cache folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("CACHED_TRANSFORMERS_CACHE", str(folder))
    return folder
