"""Processes of torchrun: process group, DDP, and exact sums over uneven shares.

A process without torchrun is a world of one, in which the functions here do nothing.
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cached_transformers.annotations import shown
from cached_transformers.memories.grc.shared_cache import caches

from .interruption import RunFailed

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The processes that train together, from the view of one of them.

    Attributes:
        group: process group; None for the default group.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    group: Any = None

    @property
    def main(self) -> bool:
        """True in the process that writes files and prints."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Return the element-wise sum over all processes in float64."""
        total = values.to(self.device, torch.float64)
        if self.size > 1:
            dist.all_reduce(total, group=self.group)
        return total

    def gather(self, value: Any) -> list[Any]:
        """Return `value` of every process, in order of rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, self.group)
        return values

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            dist.barrier(self.group)


ALONE = World(torch.device("cpu"))
"""A process without others."""


def in_world(device: str, work: Callable[[World], T]) -> T:
    """Call `work` with the world that torchrun describes in the environment.

    Args:
        device: auto, cpu, cuda or cuda:N. Under torchrun `cuda` is the device of the local rank.
        work: must not return anything that communicates.

    Raises:
        ValueError: the device does not exist, or the environment does not fit.
    """
    chosen = pick_device(device, local := _local_rank())
    if local is None:
        return work(World(chosen))
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    return in_group(lambda: work(World(chosen, dist.get_rank(), dist.get_world_size())), backend)


def _local_rank() -> int | None:
    """Return this process' number on its machine; None without other processes (ValueError: numbers do not fit)."""
    if "RANK" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    told = {name: os.environ.get(name, "0") for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    rank, local, size = (int(text) if text.isdecimal() else -1 for text in told.values())
    if not (0 <= rank < size and 0 <= local < size):
        given = ", ".join(f"{name}={text}" for name, text in told.items())
        raise ValueError(f"{given}: ranks must be whole numbers below WORLD_SIZE; start torchrun, or unset RANK")
    return local


def in_group(work: Callable[[], T], backend: str, **rendezvous: Any) -> T:
    """Call `work` with a process group; the group and its threads end with the call.

    A Gloo thread that outlives the group may abort the process at its end, or deadlock with a wrapped model. `work` is
    a function so that its local variables are gone when the group is destroyed.

    Args:
        work: must not return anything that communicates.
        backend: nccl or gloo.
        **rendezvous: arguments of `torch.distributed.init_process_group`; by default those of torchrun.
    """
    # The functions of this module hold the group at import as a default argument; imported now, they hold none.
    importlib.import_module("torch.distributed.nn.functional")
    dist.init_process_group(backend, **(rendezvous or _rendezvous()))
    group = dist.group.WORLD
    try:
        return work()
    finally:
        dist.destroy_process_group()
        gc.collect()  # wrapped models are cycles
        del group  # the last reference: its destructor waits for the threads without the GIL


def _rendezvous() -> dict[str, Any]:
    """Return rendezvous arguments: the store of torchrun under a prefix that is new for each start.

    The store outlives restarts and still has the addresses of killed processes (pytorch issue 135712). The number of
    restarts is no unique prefix, since each torchrun counts its own.
    """
    if lacking := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise ValueError(f"{' and '.join(lacking)} must be set where RANK is; start torchrun, or unset RANK")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    name = agreed_name(dist.PrefixStore("cached_transformers", store), rank, size)
    return {"store": dist.PrefixStore(name, store), "rank": rank, "world_size": size}


def agreed_name(store: dist.Store, rank: int, size: int, patience: float = 1800.0) -> str:
    """Agree on a new name in a store that may hold values of earlier processes.

    Each process but the first writes a random word; the first answers with that word and the name. A process that reads
    its own word knows that the answer is new, and confirms the name.

    Raises:
        RunFailed: a process did not come.
    """
    own, until = uuid.uuid4().hex, time.monotonic() + patience
    missing, answered = set(range(1, size)) if rank == 0 else {0}, set[str]()
    name = own

    def value(key: str) -> str:
        return store.get(key).decode() if store.check([key]) else ""

    if rank:
        store.set(f"word_{rank}", own)
    while missing:
        if time.monotonic() > until:
            waited = f"{patience:.0f} s for process {min(missing)}"
            raise RunFailed(f"process {rank} of {size} waited {waited}: see torchrun")
        if rank:
            answer = value(f"answer_{rank}").split()
            if answer[:1] == [own]:
                name = answer[1]
                store.set(f"name_{rank}", name)
                break
        for other in sorted(missing) if not rank else ():
            word = value(f"word_{other}")
            if value(f"name_{other}") == name:
                missing.discard(other)
            elif word and word not in answered:
                store.set(f"answer_{other}", f"{word} {name}")
                answered.add(word)
        time.sleep(0.005)
    return name


def pick_device(name: str, local_rank: int | None = None) -> torch.device:
    """Return the torch device of `training.device` (ValueError: unknown, or not on this machine)."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if re.fullmatch(r"cpu|cuda(:\d{1,3})?", name) is None:
        raise ValueError(f"training.device={shown(name)} is no device; use auto, cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"training.device={name!r}: this machine has no CUDA device; use training.device=cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"training.device={name!r}: this machine has {torch.cuda.device_count()} CUDA devices, from 0")
    if device.type == "cuda" and local_rank is not None:
        if local_rank >= torch.cuda.device_count():
            raise ValueError(f"LOCAL_RANK={local_rank}: this machine has {torch.cuda.device_count()} CUDA devices")
        return torch.device("cuda", local_rank)
    return device


def wrap(model: nn.Module, world: World) -> nn.Module:
    """Wrap a model in DDP if there are several processes."""
    if world.size == 1:
        return model
    for cache in caches(model):
        if cache.sync == "none":  # DDP overwrites all buffers with those of the first process
            cache.propose_current()
    devices = [world.device.index] if world.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices)
