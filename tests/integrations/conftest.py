"""Fixtures for models of others."""

from __future__ import annotations

import pytest
from integrations.cores import CORES

from cached_transformers import ATTENTIONS


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cores of `cores.py` are registered, for one test."""
    monkeypatch.setattr(ATTENTIONS, "_entries", dict(ATTENTIONS._entries))
    for name, kind in CORES.items():
        ATTENTIONS.register(name)(kind)
