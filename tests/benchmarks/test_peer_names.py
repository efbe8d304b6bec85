"""A peer that is not installed is named, and nothing else with it."""

from __future__ import annotations

import importlib.util

import pytest

from cached_lab.experiments.benchmarks.attention_peers import PEERS
from cached_lab.experiments.benchmarks.peers import lacking


def test_the_reference_of_flash_linear_attention_is_asked_for_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    peer = PEERS["gated_delta"]
    with pytest.raises(ModuleNotFoundError) as missing:
        peer.build(64, 2, 8, "cpu")
    assert lacking(peer.distribution, missing.value) == "fla-core is not installed"
