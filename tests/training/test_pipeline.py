"""Segments of a row that several processes share: loss, state and gradients are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import launch
import pytest
import torch
from contract.contract_cases import STREAMS, Case
from pipeline_worker import FEW, seen, settings_of

Seen = list[dict[str, Any]]


def run(folder: Path, which: str, processes: int) -> Seen:
    launch.python(Path(__file__).with_name("pipeline_worker.py"), folder, which, processes=processes)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(processes)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return run(tmp_path_factory.mktemp("pipeline"), "few", 2)


def compare(case: Case, found: Seen) -> None:
    """A weight without a part in anything has no gradient in one process, and may have zeros in several."""
    for name, setting in settings_of(case).items():
        alone = seen(case, setting, None)
        for rank, of_rank in enumerate(found):
            together = of_rank[f"{case} {name}"]
            assert not isinstance(together, str), f"{name}: {together}"
            for key in alone.keys() | together.keys():
                if key not in together and key.startswith("state"):
                    assert 0 < rank < len(found) - 1 or setting.segments == 1, key
                elif key not in alone or key not in together:
                    assert key.startswith("gradient") and not (alone | together)[key].any(), (name, key)
                else:
                    text = f"{name}, process {rank}, {key}"
                    torch.testing.assert_close(
                        together[key], alone[key], rtol=0, atol=1e-6, msg=lambda m, t=text: f"{t}: {m}"
                    )


@pytest.mark.parametrize("case", FEW, ids=str)
def test_two_processes_learn_what_one_learns(case: Case, two: Seen) -> None:
    compare(case, two)
