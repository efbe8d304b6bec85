"""Segments of a row that several processes share: loss, state and gradients are those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import launch
import pytest
import torch
from contract.contract_cases import STREAMS, Case
from pipeline_worker import FEW, MESH, seen, seen_in_parts, settings_of

Seen = list[dict[str, Any]]


def run(folder: Path, which: str, processes: int) -> Seen:
    launch.python(Path(__file__).with_name("pipeline_worker.py"), folder, which, processes=processes)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(processes)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return run(tmp_path_factory.mktemp("pipeline"), "few", 2)


def compare(case: Case, found: Seen, lanes: int = 1) -> None:
    """A weight without a part in anything has no gradient in one process, and may have zeros in several."""
    for name, setting in settings_of(case).items():
        alone = seen(case, setting, None)
        if alone["auxiliary"] != 0 and setting.micro_batches > 1:
            alone = seen_in_parts(case, setting)
        for rank, of_rank in enumerate(found):
            lane, place = divmod(rank, len(found) // lanes)
            together = of_rank[f"{case} {name}"]
            for key in alone.keys() | together.keys():
                if key not in together and key.startswith("state"):
                    assert place > 0 and setting.segments == 1, key  # whoever read no segment
                elif key not in together and key == "auxiliary":
                    assert lanes > 1
                elif key not in alone or key not in together:
                    assert key.startswith("gradient") and not (alone | together)[key].any(), (name, key)
                else:
                    expected = alone[key].chunk(lanes)[lane] if key.startswith("state") else alone[key]
                    text = f"{name}, process {rank}, {key}"
                    torch.testing.assert_close(
                        together[key], expected, rtol=0, atol=1e-9, msg=lambda m, t=text: f"{t}: {m}"
                    )


@pytest.mark.parametrize("case", FEW, ids=str)
def test_two_processes_learn_what_one_learns(case: Case, two: Seen) -> None:
    compare(case, two)


@pytest.mark.slow
def test_every_stream_memory_learns_what_it_learns_in_one_process(tmp_path: Path) -> None:
    found = run(tmp_path, "streams", 2)
    for case in STREAMS:
        compare(case, found)


@pytest.mark.slow
def test_two_pipelines_of_two_processes_read_other_rows(tmp_path: Path) -> None:
    found = run(tmp_path, "mesh", 4)
    for case in MESH:
        compare(case, found, lanes=2)
