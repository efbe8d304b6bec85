"""Options of GRC: what does not fit is refused when the memory is built, in words that name the way out."""

from __future__ import annotations

import pytest
from grc.small_vit import small_vit

from cached_transformers.memories.grc.grc import GRC
from cached_transformers.memories.grc.shared_cache import caches


@pytest.mark.parametrize("ratio", [k / 8 for k in range(1, 9)])
def test_ratios_that_fit_are_exact(ratio: float) -> None:
    assert GRC(16, 2, 5, ratio=ratio).cache.cache_MC.shape == (5, round(16 * ratio))


def test_caches_finds_every_layer() -> None:
    assert len(list(caches(small_vit()))) == 2
