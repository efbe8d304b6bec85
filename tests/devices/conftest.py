"""These tests run where `--device` says, and not at all without it: on the CPU others prove the same and more."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.getoption("--device") is None else None
