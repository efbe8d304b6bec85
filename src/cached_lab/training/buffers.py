"""Buffers of a model, which move without a gradient: put back after a step that does not count, and of every process.

Shared caches with sync="none" and running averages differ from process to process, while the weights are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers.memories.grc.shared_cache import caches, commit_caches

from .distributed import World


@torch.no_grad()
def remembered(model: nn.Module) -> Callable[[], None]:
    """Note the buffers as they are, with what the last step has left pending; returns what puts them back.

    Proposals of caches that come in between are dropped when buffers are put back: other rows, layers or processes may
    have been the bad ones of the step, and these proposals then are finite.
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


def by_rank(model: nn.Module, world: World) -> list[dict[str, Tensor]]:
    """The saved buffers of each process that are not those of the first, in order of rank; none where all are alike.

    Every process must ask.
    """
    if world.size == 1:
        return []
    saved = model.state_dict().keys()
    own = {name: buffer.cpu() for name, buffer in model.named_buffers() if name in saved}
    everyone: list[dict[str, Tensor]] = world.gather(own)
    differing = [
        {name: t for name, t in buffers.items() if not torch.equal(t, everyone[0][name])} for buffers in everyone
    ]
    return differing if any(differing) else []


def of_rank(
    weights: Mapping[str, Tensor], saved: Sequence[Mapping[str, Tensor]], world: World, say: Callable[[str], Any]
) -> dict[str, Tensor]:
    """Weights with the buffers of this process in them, from what `by_rank` gave.

    Where another number of processes goes on, process r takes the buffers of process r mod that number, and `say` is
    told.
    """
    if not saved:
        return dict(weights)
    if len(saved) != world.size:
        say(
            f"the checkpoint holds caches or averages of {len(saved)} processes, each with its own. Now there are "
            f"{world.size}: process r goes on with those of process r mod {len(saved)}, and the run will be another"
        )
    return {**weights, **saved[world.rank % len(saved)]}
