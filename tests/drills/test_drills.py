"""A sample of every drill; `make drills` tries them all. And the frame itself: it must see what does not hold."""

from __future__ import annotations

import sys
import time

import pytest

if not sys.platform.startswith("linux"):
    pytest.skip("drills fork, lock files and read /proc of Linux", allow_module_level=True)

from drills import catalogue
from drills.frame import Drill, Failure, carry_out


@pytest.mark.parametrize("drill", catalogue.drills(), ids=lambda drill: drill.name)
def test_a_sample_holds(drill):
    outcome = carry_out(drill, drill.cases(drill.sample, 0))
    assert outcome.results
    assert not outcome.failed, outcome.line()


def test_the_frame_sees_every_kind_of_failure():
    def attempt(case, folder):
        assert not list(folder.iterdir())
        if case == "raises":
            raise Failure("expected 1, found 2")
        if case == "breaks":
            raise KeyError("missing")
        if case == "dies":
            import os

            os.kill(os.getpid(), 9)
        if case == "hangs":
            time.sleep(60)

    drill = Drill("made", "", lambda count, seed: [], attempt, 0, 0, limit=5)
    outcome = carry_out(drill, ["holds", "raises", "breaks", "dies", "hangs"], jobs=2)
    problems = {result.case: result.problem for result in outcome.results}
    assert problems["holds"] is None
    assert problems["raises"] == "expected 1, found 2"
    assert "KeyError: 'missing'" in problems["breaks"]
    assert "status 9" in problems["dies"]
    assert "longer than" in problems["hangs"]
    assert "tried 5, held 1, failed 4" in outcome.line()
    assert "python -m drills made --case 'raises'" in outcome.line()
