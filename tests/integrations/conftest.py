"""Fixtures for models of others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from integrations.cores import CORES

from cached_transformers import ATTENTIONS


@pytest.fixture
def cores() -> Iterator[None]:
    """The cores of `cores.py` are registered, for one test."""
    before = dict(ATTENTIONS._entries)
    for name, kind in CORES.items():
        ATTENTIONS.register(name)(kind)
    yield
    ATTENTIONS._entries.clear()
    ATTENTIONS._entries.update(before)
