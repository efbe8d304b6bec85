"""Data-parallel training by torchrun: process group, wrapping, and sums that are exact for uneven shares.

A process that torchrun did not start is a world of one, in which every function here does nothing.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from cached_transformers.annotations import shown
from cached_transformers.memories.grc.shared_cache import caches

from .interruption import RunFailed

T = TypeVar("T")
PATIENCE = 1800.0
"""Seconds that processes of one start wait for each other, as those of Gloo do."""


@dataclass(frozen=True)
class World:
    """The processes that train together, seen from one of them."""

    device: torch.device
    rank: int = 0
    size: int = 1
    group: Any = None
    """Through which they speak; None for that of all."""

    @property
    def main(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Element-wise sum over all processes (float64, so that counts and long sums stay exact)."""
        total = values.to(self.device, torch.float64)
        if self.size > 1:
            dist.all_reduce(total, group=self.group)
        return total

    def gather(self, value: Any) -> list[Any]:
        """`value` of every process, in order of rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, self.group)
        return values

    def barrier(self) -> None:
        """Wait until all processes are here."""
        if self.size > 1:
            dist.barrier(self.group)


def in_world(device: str, work: Callable[[World], T]) -> T:
    """What `work` returns, called with the world that torchrun describes in the environment.

    Args:
        device: auto, cpu, cuda or cuda:N. Under torchrun `cuda` means the card of the local rank.
        work: must not return anything that communicates.

    Raises:
        ValueError: the device does not exist.
    """
    size = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    local_rank = int(os.environ.get("LOCAL_RANK", "0")) if size > 1 else None
    chosen = pick_device(device, local_rank)
    if size == 1:
        return work(World(chosen))
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    return in_group(
        lambda: work(World(chosen, dist.get_rank(), dist.get_world_size())), "nccl" if chosen.type == "cuda" else "gloo"
    )


def in_group(work: Callable[[], T], backend: str, **rendezvous: Any) -> T:
    """What `work` returns, called while there is a process group; the group and its threads end with the call.

    Left alone, a thread of Gloo may let go of a tensor while the interpreter shuts down, which aborts the process, or
    while the last reference to the group goes away inside a wrapped model, which waits for that thread and holds the
    interpreter that the thread waits for. `destroy_process_group` only forgets the group, which is why `work` is a
    function: its local variables are gone when it returns.

    Args:
        work: must not return anything that communicates.
        backend: nccl or gloo.
        **rendezvous: for `torch.distributed.init_process_group`; by default what torchrun says.
    """
    # The functions of this module keep the group that exists at their import as a default argument, for ever;
    # imported now, before there is one, they keep none.
    importlib.import_module("torch.distributed.nn.functional")
    dist.init_process_group(backend, **(rendezvous or _of_this_start()))
    group = dist.group.WORLD
    try:
        return work()
    finally:
        dist.destroy_process_group()
        gc.collect()  # wrapped models are cycles
        del group  # last of all: the one reference whose end waits for the threads without holding up the interpreter


def _of_this_start() -> dict[str, Any]:
    """Where processes meet that torchrun has started: in its store, under a name that those of this start alone know.

    The store of torchrun outlives a restart, and with it the addresses that those who were killed have left there, for
    newer ones to find (pytorch issue 135712). How often it has restarted is no such name: each torchrun counts its own.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    name = agreed_name(dist.PrefixStore("cached_transformers", store), rank, size)
    return {"store": dist.PrefixStore(name, store), "rank": rank, "world_size": size}


def agreed_name(store: dist.Store, rank: int, size: int, patience: float = PATIENCE) -> str:
    """A new name that processes agree on, in a store that may hold anything that earlier ones have said.

    Each but the first says a word that nobody has said before; the first answers with that word and the name, so that
    who reads its own word knows that the answer is new; and hears from each that it has the name.

    Raises:
        RunFailed: some process did not come.
    """
    own, until = uuid.uuid4().hex, time.monotonic() + patience
    missing, answered = set(range(1, size)) if rank == 0 else {0}, set[str]()
    name = own
    if rank:
        store.set(f"word_{rank}", own)
    while missing:
        if time.monotonic() > until:
            raise RunFailed(
                f"process {rank} of {size} waited {patience:.0f} s for process {min(missing)}, which did not come; see "
                "what torchrun says of it"
            )
        if rank:
            answer = _said(store, f"answer_{rank}").split()
            if answer[:1] == [own]:
                name = answer[1]
                store.set(f"name_{rank}", name)
                break
        for other in sorted(missing) if not rank else ():
            word = _said(store, f"word_{other}")
            if _said(store, f"name_{other}") == name:
                missing.discard(other)
            elif word and word not in answered:
                store.set(f"answer_{other}", f"{word} {name}")
                answered.add(word)
        time.sleep(0.005)
    return name


def _said(store: dist.Store, key: str) -> str:
    """What stands under a key; nothing where nothing does."""
    return store.get(key).decode() if store.check([key]) else ""


def pick_device(name: str, local_rank: int | None = None) -> torch.device:
    """The torch device for `training.device` (ValueError: unknown, or not on this machine)."""
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
        return torch.device("cuda", local_rank)
    return device


def pipeline_group(world: World, pipeline: int) -> dist.ProcessGroup:
    """The neighbouring processes, this one among them, that share rows: one line of a mesh (data, pipeline)."""
    sizes = (world.size // pipeline, pipeline)
    return init_device_mesh(world.device.type, sizes, mesh_dim_names=("data", "pipeline")).get_group("pipeline")


def wrap(model: nn.Module, world: World, some_unused: bool = False) -> nn.Module:
    """The model as it is, or with its gradients averaged over the processes after each backward pass.

    Args:
        some_unused: whether there may be weights that a process does not use in a step.
    """
    if world.size == 1:
        return model
    for cache in caches(model):
        if cache.sync == "none":  # DDP begins by overwriting all buffers with those of the first process
            cache.propose_current()
    devices = [world.device.index] if world.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=devices, find_unused_parameters=some_unused)
