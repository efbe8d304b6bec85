"""A memory in a file outside the package is right and is explained; `CONTRACTS` holds it to the rules of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contract.outside_memory import OutsideInfini
from memories.harness import build, paddings, run, segments

from cached_lab.cli.main import main
from cached_transformers.interfaces.incremental import read_segment
from cached_transformers.interfaces.memory import Query, Trace
from cached_transformers.memories.infini import Infini


@pytest.mark.parametrize("delta", [False, True])
def test_it_is_the_built_in_memory_of_the_same_equations(delta: bool) -> None:
    ours = build({"name": "infini", "update": "delta" if delta else "linear"})
    outside = build({"name": "outside_infini", "delta": delta})
    outside.load_state_dict(ours.state_dict())
    given = segments(4), None, paddings(4)
    for hidden, got, want in zip(paddings(4), run(outside, *given), run(ours, *given), strict=True):
        torch.testing.assert_close(got.outputs[~hidden], want.outputs[~hidden], rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", [OutsideInfini, Infini])
def test_an_answer_without_a_like_key_is_finite(kind: Any) -> None:
    """Far below zero (after RandLora's default scale, 640) all features of a query or key are 0, and 0 / 0 is NaN."""
    memory, far = kind(8, 2), torch.full((1, 2, 3, 4), -200.0)
    query = Query(far.transpose(1, 2).flatten(2), q_BHNE=far, k_BHNE=far, v_BHNE=far)
    state = memory.init_state(1, far)
    for _ in range(2):
        reading = read_segment(memory, state, query, None)
        assert memory.combine(far, query, reading).isfinite().all()
        state = memory.write(state, Trace(query.x_BND, query.x_BND, query, reading))[0]


def test_it_is_listed_and_explained_as_the_built_in_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "memories"]) == 0
    assert "outside_infini" in capsys.readouterr().out
    assert main(["explain", "outside_infini"]) == 0
    said = capsys.readouterr().out
    for line in ("outside_infini (memory)", "A matrix per head", "arXiv:2404.07143", "M' = M + s(K)^T V"):
        assert line in said
    assert "delta: bool = False" in said and "initial_gate: float = 0.0" in said
