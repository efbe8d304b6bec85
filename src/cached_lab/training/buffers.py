"""Buffers of a model in training: restored after a skipped step, and saved per process where they differ.

Shared caches with sync="none" and running averages differ between data-parallel processes; weights do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers.memories.grc.shared_cache import caches, commit_caches

from .distributed import World


@torch.no_grad()
def remember_buffers(model: nn.Module) -> Callable[[], None]:
    """Commit pending cache updates, copy all buffers, and return a function that restores them.

    The function also drops cache updates proposed since: they may be finite although another process, layer or row of
    the step was not.
    """
    commit_caches(model)
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]

    @torch.no_grad()
    def put_back() -> None:
        for buffer, value in before:
            buffer.copy_(value)
        for cache in caches(model):
            cache.propose_current()

    return put_back


def buffers_by_rank(model: nn.Module, world: World) -> list[dict[str, Tensor]]:
    """Return per process the saved buffers that differ from the first process; empty if none differ.

    Every process must call this.
    """
    if world.size == 1:
        return []
    saved = model.state_dict().keys()
    own = {name: buffer.cpu() for name, buffer in model.named_buffers() if name in saved}
    gathered: list[dict[str, Tensor]] = world.gather(own)
    differing = [{n: t for n, t in buffers.items() if not torch.equal(t, gathered[0][n])} for buffers in gathered]
    return differing if any(differing) else []


def with_own_buffers(
    weights: Mapping[str, Tensor], saved: Sequence[Mapping[str, Tensor]], world: World, say: Callable[[str], Any]
) -> dict[str, Tensor]:
    """Return the weights with this process' buffers from `buffers_by_rank`.

    If the number of processes has changed, process r takes the buffers of process r modulo the old number, and `say`
    is told.
    """
    if not saved:
        return dict(weights)
    if len(saved) != world.size:
        say(f"{len(saved)} processes saved caches of their own: process r of {world.size} takes r mod {len(saved)}")
    return {**weights, **saved[world.rank % len(saved)]}
