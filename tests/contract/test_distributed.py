"""Two processes: the gradient of one process with all rows, caches that follow their `sync`, counts of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import launch
import pytest
import torch
from common import TORCH
from contract.contract_cases import MAIN_STREAMS, Case, cases
from contract.distributed_worker import SHARED, SYNCS, WITH_OTHER_CORES, stream_gradients

Seen = list[dict[str, Any]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Results that the two processes stored."""
    folder = tmp_path_factory.mktemp("distributed")
    script = Path(__file__).with_name("distributed_worker.py")
    launch.python(script, folder, processes=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@cases(MAIN_STREAMS)
def test_two_processes_give_the_gradient_of_one(case: Case, seen: Seen) -> None:
    alone = stream_gradients(case)
    for rank in range(2):
        torch.testing.assert_close(seen[rank][str(case)], alone, rtol=0, atol=1e-6)


@cases(SHARED)
@pytest.mark.parametrize("steps", [1, 3, "evaluated"])
def test_a_shared_cache_follows_its_sync(case: Case, steps: int | str, seen: Seen) -> None:
    caches = {sync: [seen[rank][str((case, sync, steps))] for rank in range(2)] for sync in SYNCS}
    for sync in ("mean", "broadcast"):
        torch.testing.assert_close(*caches[sync], rtol=0, atol=0)
    for a, b in zip(*caches["none"], strict=True):
        assert (a - b).abs().max() > 1e-2, "sync='none': one process overwrote the other's cache"


@cases(WITH_OTHER_CORES)
def test_caches_are_shared_with_every_attention(case: Case, seen: Seen) -> None:
    ours, theirs = (seen[rank][str((case, "mean", 3))] for rank in range(2))
    assert ours and all(cache.abs().max() > 0 for cache in ours)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_what_modules_count_is_added_up_over_processes(seen: Seen) -> None:
    """Rows differ between processes; DistributedDataParallel, which copies buffers, does not touch the counts."""
    counts = [seen[rank]["dropped tokens"] for rank in range(2)]
    total = counts[0]["own"] + counts[1]["own"]
    assert torch.equal(counts[0]["all"], total) and torch.equal(counts[1]["all"], total)
    assert total[1] == 3 * 30 and total[0] > 0


@pytest.mark.skipif(TORCH < (2, 13) or not Path("/proc/self/task").exists(), reason="counts threads by name")
def test_no_thread_of_the_process_group_outlives_it(seen: Seen) -> None:
    """One that did, and let go of a tensor while the interpreter shut down, would abort the process now and then."""
    for rank in range(2):
        assert seen[rank]["threads"] > 0 and seen[rank]["threads left"] == 0


@cases(SHARED)
def test_what_is_shared_after_one_step(case: Case, seen: Seen) -> None:
    """With weights and caches still equal, the caches of sync="none" are what the other modes put together."""
    own, mean, first = (
        [seen[rank][str((case, sync, 1))] for rank in range(2)] for sync in ("none", "mean", "broadcast")
    )
    for layer, (a, b) in enumerate(zip(*own, strict=True)):
        torch.testing.assert_close(mean[0][layer], (a + b) / 2, rtol=0, atol=1e-6)
        assert torch.equal(first[1][layer], a)


@cases(SHARED)
def test_evaluating_between_steps_leaves_each_process_its_own_cache(case: Case, seen: Seen) -> None:
    for rank in range(2):
        plain, evaluated = (seen[rank][str((case, "none", steps))] for steps in (3, "evaluated"))
        torch.testing.assert_close(plain, evaluated, rtol=0, atol=1e-6)
