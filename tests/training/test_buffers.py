"""Shared caches and other buffers: a step that does not count leaves none of it, and tallies are added up."""

from __future__ import annotations

import shutil
from pathlib import Path

import pairs
import pytest
import torch
from contract.contract_cases import CASES, Case, cases
from torch import Tensor, nn

from cached_lab.experiments.run import run_training
from cached_lab.tasks.recipes import config_from_dict
from cached_lab.training.buffers import buffers_by_rank, remember_buffers, with_own_buffers
from cached_lab.training.checkpoint import Checkpoints, read_checkpoint
from cached_lab.training.distributed import World, in_world, wrap
from cached_lab.training.metrics import read_metrics, tallies
from cached_transformers.layers import SwitchFeedForward
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


class Counting(nn.Module):
    def __init__(self, **counts: tuple[int, int]) -> None:
        super().__init__()
        self.counts = counts

    def tallies(self) -> dict[str, Tensor]:
        found, self.counts = self.counts, dict.fromkeys(self.counts, (0, 0))
        return {name: torch.tensor(pair) for name, pair in found.items()}


def test_pairs_of_one_name_are_added_up_and_begin_anew() -> None:
    model = nn.Sequential(Counting(a=(1, 4)), nn.Linear(2, 2), Counting(a=(2, 6), b=(5, 5)))
    world = World(torch.device("cpu"))
    assert {name: pair.tolist() for name, pair in tallies(model, world).items()} == {"a": [3, 10], "b": [5, 5]}
    assert {name: pair.tolist() for name, pair in tallies(model, world).items()} == {"a": [0, 0], "b": [0, 0]}
    assert tallies(nn.Linear(2, 2), world) == {}


def recipe(tmp_path: Path) -> dict[str, object]:
    (tmp_path / "input.txt").write_text("a text of some letters, read again and again. " * 200, encoding="utf-8")
    experts = {"experts": 4, "every": 1, "capacity_factor": 0.5}
    sizes = {"width": 16, "depth": 2, "heads": 2, "feed_forward": 32, "experts": experts}
    training = {"steps": 6, "batch_size": 4, "segment_length": 16, "log_every": 3, "evaluate_every": 2}
    return {
        "name": "experts",
        "data": {"name": "enwik8", "path": str(tmp_path / "input.txt")},
        "model": {"name": "language_model", **sizes},
        "training": {**training, "metric": "loss", "tensorboard": False, "device": "cpu", "test": "none"},
    }


def shares(folder: Path) -> list[float]:
    return [line["dropped_tokens"] for line in read_metrics(folder / "metrics.jsonl") if line["split"] == "train"]


def test_dropped_tokens_are_logged_and_an_interruption_does_not_change_them(tmp_path: Path) -> None:
    """Continued from step 4, between two lines: the line of step 6 still has the tokens of steps 4, 5 and 6."""
    config = config_from_dict(recipe(tmp_path))
    run_training(config, tmp_path / "whole")
    whole = shares(tmp_path / "whole")
    assert len(whole) == 2 and all(0.4 < share < 0.8 for share in whole)  # half as many places as there are tokens
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    point = Checkpoints(tmp_path / "parts" / "checkpoints").path(4)
    assert read_checkpoint(point).training["tallies"]["dropped_tokens"][1] == 2 * 4 * 16
    run_training(config, tmp_path / "parts", resume=str(point))
    assert shares(tmp_path / "parts") == whole


def test_compiled_code_counts_too() -> None:
    module = SwitchFeedForward(8, 16, 4, capacity_factor=0.5)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x_BND = torch.randn(2, 6, 8)
    counts = []
    for run in (module, compiled):
        run(x_BND)[0].sum().backward()
        run(x_BND)
        counts.append(module.tallies()["dropped_tokens"].tolist())
    assert counts[0] == counts[1] and counts[0][1] == 24 and counts[0][0] > 0
    torch.testing.assert_close(module(x_BND)[0], compiled(x_BND)[0])
