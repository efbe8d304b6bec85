"""A memory in a file outside the package is right and is explained; `CONTRACTS` holds it to the rules of all."""

from __future__ import annotations

import contract.outside_memory  # noqa: F401  (registers it)
import pytest
import torch
from memories.harness import build, paddings, run, segments

from cached_lab.cli.main import main


@pytest.mark.parametrize("delta", [False, True])
def test_it_is_the_built_in_memory_of_the_same_equations(delta: bool) -> None:
    ours = build({"name": "infini", "update": "delta" if delta else "linear"})
    outside = build({"name": "outside_infini", "delta": delta})
    outside.load_state_dict(ours.state_dict())
    given = segments(4), None, paddings(4)
    for hidden, got, want in zip(paddings(4), run(outside, *given), run(ours, *given), strict=True):
        torch.testing.assert_close(got.outputs[~hidden], want.outputs[~hidden], rtol=0, atol=1e-10)


def test_it_is_listed_and_explained_as_the_built_in_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "memories"]) == 0
    assert "outside_infini" in capsys.readouterr().out
    assert main(["explain", "outside_infini"]) == 0
    said = capsys.readouterr().out
    for line in ("outside_infini (memory)", "A matrix per head", "arXiv:2404.07143", "M' = M + s(K)^T V"):
        assert line in said
    assert "delta: bool = False" in said and "initial_gate: float = 0.0" in said
