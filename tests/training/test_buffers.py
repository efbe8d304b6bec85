"""Shared caches and other buffers: a step that does not count leaves none of it, and every process keeps its own."""

from __future__ import annotations

from pathlib import Path

import pairs
import pytest
import torch
from contract.contract_cases import CASES, Case, cases
from torch import Tensor

from cached_lab.training.buffers import buffers_by_rank, remember_buffers, with_own_buffers
from cached_lab.training.distributed import World, in_world, wrap
from cached_transformers.memories.grc.shared_cache import caches, commit_caches

SHARED = [case for case in CASES if case.shared and case.attention == "softmax"]
SYNCS = ("none", "mean", "broadcast")


def rows(case: Case, seed: int, rank: int = 0, size: int = 1) -> Tensor:
    return case.segments(1, rows=2 * size, seed=seed)[0].chunk(size)[rank]


def trained(case: Case, sync: str, world: World, bad: bool) -> list[Tensor]:
    """Caches after two steps, between which there is one that does not count, or not."""
    model = case.build(options={"sync": sync})
    wrapped = wrap(model, world).train()
    for step in (0, 1, 2) if bad else (0, 2):
        put_back = remember_buffers(model)
        before = [cache.cache_MC.clone() for cache in caches(model)]
        wrapped(rows(case, step, world.rank, world.size))
        if step == 1:
            put_back()
        commit_caches(model)
        moved = [not torch.equal(cache.cache_MC, was) for cache, was in zip(caches(model), before, strict=True)]
        assert moved and all(moved) if step != 1 else not any(moved), f"sync={sync}, step {step}: {moved}"
    return [cache.cache_MC.clone() for cache in caches(model)]


@cases(SHARED)
@pytest.mark.parametrize("sync", SYNCS)
def test_a_step_that_does_not_count_moves_no_cache(case: Case, sync: str) -> None:
    alone = World(torch.device("cpu"))
    assert all(map(torch.equal, *(trained(case, sync, alone, bad) for bad in (True, False))))


def test_nor_on_any_of_two_processes(tmp_path: Path) -> None:
    """A process whose own rows are good must forget them, too."""
    case = next(case for case in SHARED if case.memory == "grc")

    def compared(world: World) -> None:
        for sync in SYNCS:
            assert all(map(torch.equal, *(trained(case, sync, world, bad) for bad in (True, False)))), sync

    assert pairs.statuses(pairs.start(lambda: in_world("cpu", compared), tmp_path / "meeting")) == [0, 0]


def test_another_number_of_processes_is_told_and_takes_turns() -> None:
    saved = [{}, {"cache": torch.ones(1)}]
    said: list[str] = []
    weights = {"cache": torch.zeros(1), "weight": torch.full((1,), 2.0)}
    for rank, expected in enumerate((0.0, 1.0, 0.0)):
        found = with_own_buffers(weights, saved, World(torch.device("cpu"), rank, 3), said.append)
        assert found["cache"] == expected and found["weight"] == 2
    assert len(said) == 3 and "2 processes" in said[0] and "r mod 2" in said[0]
    assert with_own_buffers(weights, saved, World(torch.device("cpu"), 1, 2), pytest.fail)["cache"] == 1
    assert buffers_by_rank(torch.nn.BatchNorm1d(2), World(torch.device("cpu"))) == []
