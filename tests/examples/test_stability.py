"""`examples/stability.py`: it tells bounded states from growing and broken ones."""

from __future__ import annotations

import math

import pytest
import torch

from examples.stability import CASES, PLACES, StabilityCase, _titans, main, measure


def named(**options: object) -> StabilityCase:
    return StabilityCase("titans", options, _titans)


def test_limits_hold_a_rate_that_is_too_large() -> None:
    held = measure(named(rate=1000.0), 1024, 1, torch.float32)
    assert len(held) == len(PLACES) + 1 and all(math.isfinite(size) for size in held) and max(held) == held[-1]
    broken = measure(named(rate=1000.0, limit=1e30), 1024, 1, torch.float32)
    assert broken[-1] == math.inf, "without the limit the same rate diverges, and that is said"


def test_shares_of_two_grow_where_nothing_decays_and_shares_of_one_do_not() -> None:
    """A reflection keeps the norm of a state, so that its updates add up like a random walk."""
    cases = {bool(case.options.get("negative_eigenvalues")): case for case in CASES if case.name == "gated_delta"}
    grown, kept = (measure(cases[negative], 4096, 1, torch.float32) for negative in (True, False))
    assert grown[3] > 1.5 * grown[1] and kept[3] < 1.5 * kept[1]


def test_the_table_has_a_row_for_each_and_bad_numbers_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("examples.stability.CASES", CASES[-1:])
    main(["--tokens", "512", "--seeds", "1"])
    out = capsys.readouterr().out
    assert "| `delta_net` | float32 |" in out and "| `delta_net` | bfloat16 |" in out and "after 512 tokens" in out
    with pytest.raises(ValueError, match="--tokens 100"):
        main(["--tokens", "100"])
