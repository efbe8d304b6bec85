"""The curriculum over the number of segments."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from refusals import refuses

from cached_transformers.loops.curriculum import AdaptiveCurriculum, Curriculum


def test_numbers_are_drawn_evenly_up_to_the_largest_of_the_stage() -> None:
    curriculum = Curriculum([1, 2, 5], steps_each=[100, 2000, 5000])
    drawn = list(curriculum)
    assert len(drawn) == len(curriculum) == 7100
    assert set(drawn[:100]) == {1}
    for part, largest in ((drawn[100:2100], 2), (drawn[2100:], 5)):
        counts = Counter(part)
        assert set(counts) == set(range(1, largest + 1))
        assert all(abs(n - len(part) / largest) < 0.15 * len(part) / largest for n in counts.values())


def test_the_largest_number_every_time() -> None:
    assert list(Curriculum([2, 3], steps_each=2, uniform=False)) == [2, 2, 3, 3]


def test_a_step_depends_on_seed_and_step_alone() -> None:
    first, again, other = (Curriculum([3, 7], 50, seed=seed) for seed in (1, 1, 2))
    assert list(first) == list(again) != list(other)
    assert [*first[:37], *first[37:]] == list(first), "training that is resumed goes on as it would have"
    assert first[60] == list(first)[60] and first[-1] == list(first)[-1]
    assert [first.largest(step) for step in (0, 49, 50, 99, 1000)] == [3, 3, 7, 7, 7]
    with pytest.raises(IndexError, match=r"100.*100"):
        first[100]


def test_a_stage_lasts_until_it_is_solved() -> None:
    curriculum = AdaptiveCurriculum([1, 3, 7], solved=0.9, seed=1)
    found = []
    for accuracy in (0.5, 0.9, 0.2, 0.95, 1.0, 1.0):
        found.append((curriculum.largest(), curriculum.scored(accuracy)))
    assert found == [(1, False), (1, True), (3, False), (3, True), (7, False), (7, False)]
    same = Curriculum([7], 50, seed=1)
    assert [curriculum.segments(step) for step in range(60)] == [same.segments(step) for step in range(60)]
    assert [same.segments(step) for step in range(50)] == list(same)


@pytest.mark.parametrize("solved", [0, 1.01])
def test_an_accuracy_that_nothing_reaches_is_refused(solved: float) -> None:
    refuses(f"solved={solved} must be an accuracy above 0 and up to 1", AdaptiveCurriculum, [1, 2], solved)
    refuses(r"stages=\[2, 1\]", AdaptiveCurriculum, [2, 1], 0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 5), "at least one number of segments"),
        (([0, 1], 5), r"stages=\[0, 1\] must be .* each at least 1"),
        (([2, 2], 5), r"stages=\[2, 2\] must grow"),
        (([1, 2], 0), "steps_each=0 must be at least 1"),
        (([1, 2], [5]), r"steps_each=\[5\] must be .* one for each of 2 stages"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: Any, message: str) -> None:
    refuses(message, Curriculum, *arguments)
