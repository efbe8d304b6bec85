"""One of two processes of `test_distributed`: trains every case on its half of the rows and stores what it saw.

How caches are shared does not depend on the attention core: with softmax there is every `sync` and number of steps,
with each other core one of them.

Called by torchrun as: distributed_worker.py FOLDER, for FOLDER/0.pt and FOLDER/1.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))

from contract.contract_cases import CASES, MAIN_STREAMS, SEGMENT, Case

from cached_lab.training.distributed import World, in_world
from cached_lab.training.metrics import tallies
from cached_transformers.layers import SwitchFeedForward
from cached_transformers.loops.segments import SegmentLoop
from cached_transformers.memories.grc.shared_cache import caches, commit_caches

ROWS = 4
SYNCS = ("mean", "broadcast", "none")
KINDS = ("grc", "attention_cache", "attention_cache/store")
SHARED = [case for case in CASES if case.shared and case.attention == "softmax" and case.memory in KINDS]
WITH_OTHER_CORES = [case for case in CASES if case.shared and case.attention != "softmax"]


def half(t: Tensor, rank: int, size: int) -> Tensor:
    return t.chunk(size)[rank]


def stream_gradients(case: Case, rank: int = 0, size: int = 1) -> dict[str, Tensor]:
    """Gradients of one backward over four segments, two windows; of all rows, or of this process's share under DDP."""
    model = case.build()
    loop: nn.Module = SegmentLoop(model, SEGMENT, bptt=2)
    if size > 1:
        loop = DistributedDataParallel(loop)
    tokens = half(torch.cat(case.segments(5, rows=ROWS), 1), rank, size)
    n = 4 * SEGMENT
    loop(tokens[:, :n], tokens[:, 1 : n + 1])[0].backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def shared_caches(case: Case, sync: str, rank: int, size: int, steps: int, evaluate: bool = False) -> list[Tensor]:
    """The caches of this process after training under DDP, which broadcasts buffers as it does by default."""
    model = case.build(options={"sync": sync})
    wrapped = DistributedDataParallel(model, broadcast_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(steps):
        if evaluate:
            wrapped.eval()
            with torch.no_grad():
                wrapped(half(case.segments(1, rows=ROWS)[0], rank, size))
            wrapped.train()
        optimizer.zero_grad()
        wrapped(half(case.segments(1, rows=ROWS, seed=step)[0], rank, size)).outputs.square().mean().backward()
        optimizer.step()
    commit_caches(model)
    return [cache.cache_MC.clone() for cache in caches(model)]


def dropped_tokens(processes: World) -> dict[str, Tensor]:
    """Tokens dropped by a mixture's experts, for rows that differ between the processes: the run's count of all, and
    this process's own, counted by hand."""
    torch.manual_seed(0)
    module = SwitchFeedForward(8, 16, 4, capacity_factor=0.5)
    wrapped = DistributedDataParallel(module)
    own = torch.zeros(2, dtype=torch.float64)
    for step in range(3):
        torch.manual_seed(10 * step + processes.rank)
        x_BND = torch.randn(2 + processes.rank, 6, 8)
        y_BND, loss = wrapped(x_BND)
        (y_BND.sum() + loss).backward()
        chosen = (x_BND.flatten(0, 1) @ module.router_ED.T).argmax(-1)
        capacity = -(-len(chosen) // 8)
        own += torch.tensor([(chosen.bincount() - capacity).clamp(min=0).sum(), len(chosen)])
    return {"all": tallies(module, processes)["dropped_tokens"], "own": own}


def train_all(processes: World) -> dict[str, Any]:
    """Results of this process, by case and setting."""
    rank, size = processes.rank, processes.size
    seen: dict[Any, Any] = {case: stream_gradients(case, rank, size) for case in MAIN_STREAMS}
    for case in SHARED:
        for sync in SYNCS:
            for steps in (1, 3):
                seen[case, sync, steps] = shared_caches(case, sync, rank, size, steps)
            seen[case, sync, "evaluated"] = shared_caches(case, sync, rank, size, 3, evaluate=True)
    for case in WITH_OTHER_CORES:
        seen[case, "mean", 3] = shared_caches(case, "mean", rank, size, 3)
    seen["dropped tokens"] = dropped_tokens(processes)
    processes.barrier()
    return {"rank": rank, "threads": group_threads(), **{str(key): value for key, value in seen.items()}}


def group_threads() -> int:
    """Threads of the process group, which Linux shows by name; -1 elsewhere."""
    tasks = Path("/proc/self/task")
    return sum("gloo" in (task / "comm").read_text() for task in tasks.iterdir()) if tasks.exists() else -1


if __name__ == "__main__":
    torch.set_num_threads(1)
    seen = in_world("cpu", train_all)
    torch.save({**seen, "threads left": group_threads()}, Path(sys.argv[1]) / f"{seen['rank']}.pt")
