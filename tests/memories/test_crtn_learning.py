"""CRTN learns which region to recall; without its regions nothing could be known."""

from __future__ import annotations

from typing import Any

import pytest
from memories.learning import LATCH, accuracy, reach, trained


def recalled(memory: dict[str, Any] | None, steps: int) -> float:
    return accuracy(trained(LATCH, memory, steps), LATCH)


BARE = {"name": "crtn", "segment": LATCH.segment, "regions": 3, "topk": 1}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"scope": "token"}, {"query": "compute_first", "summary": "bilstm"}])
def test_every_kind_of_query_learns_what_to_recall(options: dict[str, Any]) -> None:
    assert recalled({**BARE, **options}, 300) > 0.95


def test_it_learns_which_of_three_regions_to_recall() -> None:
    """One layer and one region at a time: the first segment must be chosen for the fourth."""
    assert recalled({**BARE, "rescale": True, "scale": True}, 150) > 0.95


@pytest.mark.slow
def test_a_choice_that_nothing_trains_falls_short() -> None:
    """To the letter no gradient reaches the summary; what it picks still moves, since the embeddings learn."""
    assert 0.5 < recalled({**BARE, "rescale": True, "scale": True, "alpha_grad": False}, 150) < 0.9


def test_without_regions_the_first_segment_is_out_of_reach() -> None:
    for memory in (None, {"name": "transformer_xl", "length": LATCH.segment}):
        assert reach(LATCH, memory) == 0 < reach(LATCH, BARE)
