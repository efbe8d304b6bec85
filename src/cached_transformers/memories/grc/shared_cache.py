"""A cache shared by all rows and steps: a buffer that training updates and evaluation reads.

The rules are those of Algorithm 1, lines 2-6 (arXiv:2312.12742). With C_t the cache of training step t:

    training forward t      cache_MC <- C_{t-1}  (commit the pending proposal),  then proposal <- C_t  (propose)
    commit(), eval(), state_dict(), copies      cache_MC <- C_t
    recomputation, hold_caches, evaluation      neither proposes nor commits
    an update that is not finite                proposal <- C_{t-1}

A subclass defines the update: `GatedRecurrentCache`, and the two caches of `attention_cache.py`.

Legend: B rows, N tokens, M slots, C cache width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cached_transformers.annotations import checked
from cached_transformers.memories.parts.interpolation import Interpolation, check_size, interpolate

Sync = Literal["broadcast", "mean", "none"]
Attend = Literal["mean", "sample", "stored"]


def in_backward() -> bool:
    """True while autograd is running: a forward now is a recomputation by activation checkpointing."""
    return torch._C._current_graph_task_id() != -1  # private: PyTorch has no public function for this


# Custom operators, so that compiled code asks `in_backward` when it runs, not when it is traced.
@torch.library.custom_op("cached_transformers::commit_cache", mutates_args=("cache", "fresh"))
def commit_cache(cache: Tensor, proposal: Tensor, fresh: Tensor, keep: bool) -> None:
    """Copy `proposal` into `cache` if `fresh`, then clear `fresh` unless `keep`; do nothing during recomputation."""
    if not in_backward():
        cache.copy_(torch.where(fresh, proposal, cache))
        if not keep:
            fresh.zero_()


@torch.library.custom_op("cached_transformers::propose_cache", mutates_args=("proposal", "fresh"))
def propose_cache(proposal: Tensor, fresh: Tensor, new: Tensor, current: Tensor, sync: str) -> None:
    """Store `new` as the next cache, averaged or broadcast over processes; `current` if `new` is not finite."""
    if in_backward():
        return
    proposal.copy_(torch.where(torch.isfinite(new).all(), new.to(proposal.dtype), current))
    if sync != "none" and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        if sync == "mean":
            dist.all_reduce(proposal)
            proposal.div_(dist.get_world_size())
        else:
            dist.broadcast(proposal, 0)
    fresh.fill_(True)


@checked
class SharedCache(nn.Module):
    """A buffer updated once per training step, which no training loop need know of; float32 in half-precision models.

    `AveragedModel`, and timm's `ModelEmaV3` with exclude_buffers=True, copy it; without, `ModelEmaV3` averages it, too.

    Args:
        width: C, channels of the cache. length: M, slots.
        attend: what rows read in training: the batch "mean" of the update (Algorithm 1), each row ("sample") its own
            update, or the cache as it was "stored" before the step. The mean is stored in any case.
        sync: how distributed processes combine their proposals: all take rank 0's ("broadcast", as batch norm), the
            mean, or each keeps its own ("none").
        interpolation: "nearest", "linear" or "area", if the numbers of tokens and slots differ.
        size: (height, width) of the cache as a map, for two-dimensional interpolation; None for one dimension.
        prefix: class tokens before the map, which keep their own slots.
    """

    cache_MC: Tensor

    def __init__(
        self,
        width: int,
        length: int,
        *,
        attend: Attend = "mean",
        sync: Sync = "broadcast",
        interpolation: Interpolation = "nearest",
        size: tuple[int, int] | None = None,
        prefix: int = 0,
    ) -> None:
        super().__init__()
        check_size(length, size, prefix)
        self.width, self.length, self.size, self.prefix = width, length, size, prefix
        self.interpolation, self.attend, self.sync, self.held = interpolation, attend, sync, False
        self.register_buffer("cache_MC", torch.zeros(length, width, dtype=_wide(torch.get_default_dtype())))
        self._set_pending(self.cache_MC)

    def slots(self, x_BNC: Tensor, padding_BN: Tensor | None = None, size: tuple[int, int] | None = None) -> Tensor:
        """Interpolate the tokens to the slots, (B, M, C), each row over its own valid tokens."""
        return interpolate(
            x_BNC, self.length, self.interpolation, padding_BN, size=size, to_size=self.size, prefix=self.prefix
        )

    def update(self, s_BMC: Tensor, cache_MC: Tensor) -> Tensor:
        """(B, M, C): the cache updated by each row's slots, in the dtype of `cache_MC`, which is a constant."""
        raise NotImplementedError("abstract: a cache writes update()")

    def mean_update(
        self, x_BNC: Tensor, padding_BN: Tensor | None, size: tuple[int, int] | None, cache_MC: Tensor
    ) -> Tensor:
        """(M, C): mean over rows of `update` by these tokens; rows that are all padding take no part."""
        return cache_MC + row_mean(self.update(self.slots(x_BNC, padding_BN, size), cache_MC) - cache_MC, padding_BN)

    @property
    def constant_in_evaluation(self) -> bool:
        """True if evaluation reads the stored cache, so that its keys and values can be folded."""
        return self.attend != "sample"

    def forward(self, x_BNC: Tensor, padding_BN: Tensor | None = None, size: tuple[int, int] | None = None) -> Tensor:
        """Return the cache to attend: (M, C), or (B, M, C) with attend="sample".

        Training proposes the update by `x_BNC` for the next step; evaluation discards it, if it makes one.
        """
        writes, transformed = self.training and not self.held, torch._C._are_functorch_transforms_active()
        if writes and transformed:
            raise ValueError(
                "training=True inside vmap or grad of torch.func: each sample would write the cache that all share; "
                "call eval() first, or compute the gradients inside `with hold_caches(model)`"
            )
        if writes or (self.sync == "none" and not transformed):
            self.commit()
        if not self.training and self.constant_in_evaluation:
            return self.cache_MC
        if 0 in x_BNC.shape[:2]:
            raise ValueError(
                f"a batch of {x_BNC.shape[0]} rows of {x_BNC.shape[1]} tokens has nothing to update the cache by; "
                "leave empty batches out"
            )
        # A copy: the next commit overwrites the buffer, and a graph that awaits its backward must not see that.
        cache_MC = self.cache_MC.clone() if self.training else self.cache_MC
        if self.attend == "sample":
            attended = self.update(self.slots(x_BNC, padding_BN, size), cache_MC)
            new_MC = cache_MC + row_mean(attended - cache_MC, padding_BN) if self.training else cache_MC
        else:
            new_MC = self.mean_update(x_BNC, padding_BN, size, cache_MC)
            attended = new_MC if self.attend == "mean" else cache_MC
        if writes:
            propose_cache(self._proposal_MC, self._fresh, new_MC.detach(), cache_MC, self.sync)
        return attended

    def commit(self) -> None:
        """Make the pending proposal, if any, the cache."""
        # sync="none" keeps the proposal in force: DDP may broadcast rank 0's buffer over ours before any forward.
        commit_cache(self.cache_MC, self._proposal_MC, self._fresh, keep=self.sync == "none")

    @torch.no_grad()
    def propose_current(self) -> None:
        """Propose the cache as it is: drop the pending proposal, and undo writes to the buffer before the next training
        forward, such as DDP's broadcast."""
        self._proposal_MC.copy_(self.cache_MC)
        self._fresh.fill_(True)

    @torch.no_grad()
    def reset_cache(self) -> None:
        """Empty the cache: zeros, no proposal pending."""
        self._fresh.zero_()
        self.cache_MC.zero_()

    @torch.no_grad()
    def resize_cache(self, length: int, size: tuple[int, int] | None = None) -> None:
        """Interpolate the stored cache to another number of slots (and map size)."""
        check_size(length, size, self.prefix)
        self.commit()
        mode: Interpolation = "nearest" if self.interpolation == "nearest" else "linear"
        maps: dict[str, Any] = {}
        if self.size is not None and size is not None:
            maps = {"size": self.size, "to_size": size, "prefix": self.prefix}
        cache_BMC = interpolate(self.cache_MC[None], length, mode, **maps)
        self.length, self.size = length, size
        self.cache_MC = cache_BMC[0].clone()
        self._set_pending(self.cache_MC)

    def train(self, mode: bool = True) -> SharedCache:
        """Set the mode as nn.Module.train; leaving training commits the pending proposal."""
        if not mode and self.training:
            self.commit()
        return super().train(mode)

    def _set_pending(self, like: Tensor) -> None:
        # Plain attributes, not buffers: DDP broadcasts buffers from rank 0, which would defeat sync="none" and "mean".
        self._proposal_MC = torch.zeros_like(like)
        self._fresh = torch.zeros((), dtype=torch.bool, device=like.device)

    def _settle(self) -> None:
        """Match the pending tensors to the buffer after a move, a cast or a load."""
        if self.cache_MC.dtype != _wide(self.cache_MC.dtype):
            self.cache_MC = self.cache_MC.to(_wide(self.cache_MC.dtype))
        if self._fresh.is_meta and not self.cache_MC.is_meta:  # built on the meta device: nothing can be pending
            self._set_pending(self.cache_MC)
        self._proposal_MC = self._proposal_MC.to(self.cache_MC.device, self.cache_MC.dtype)
        self._fresh = self._fresh.to(self.cache_MC.device)

    def __getstate__(self) -> dict[str, Any]:
        # A copy (EMA, pickle) starts from the committed cache; our pending proposal must not overwrite it later.
        self.commit()
        return {**self.__dict__, "_fresh": torch.zeros_like(self._fresh)}

    def _apply(self, fn: Any, recurse: bool = True) -> SharedCache:
        before = self.cache_MC
        super()._apply(fn, recurse)
        if self.cache_MC.dtype != _wide(self.cache_MC.dtype):  # .half(), .bfloat16(): the recurrence needs the digits
            self.cache_MC = before.to(self.cache_MC.device, _wide(self.cache_MC.dtype))
        self._settle()
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.commit()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        stored = state_dict.get(prefix + "cache_MC")
        if stored is not None and stored.shape != self.cache_MC.shape:
            raise ValueError(
                f"{prefix}cache_MC: the checkpoint holds a cache of {tuple(stored.shape)} (slots, channels), this "
                f"model has {tuple(self.cache_MC.shape)}; build the model with length={stored.shape[0]}, or call "
                f"resize_caches(model, {stored.shape[0]}) before loading and resize_caches(model, {self.length}) after "
                "it, or drop the key from the checkpoint and call reset_caches(model)"
            )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self._settle()
        self._fresh.zero_()


def row_mean(x_BMC: Tensor, padding_BN: Tensor | None) -> Tensor:
    """Mean over rows, except rows that are all padding; zeros if all are."""
    if padding_BN is None:
        return x_BMC.mean(0)
    weight = (~padding_BN).any(1).to(x_BMC.dtype)
    return torch.einsum("b,bmc->mc", weight / weight.sum().clamp(min=1), x_BMC)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def caches(model: nn.Module) -> Iterator[SharedCache]:
    """Every shared cache in `model`."""
    return (m for m in model.modules() if isinstance(m, SharedCache))


def commit_caches(model: nn.Module) -> None:
    """Commit the pending proposal of every cache of `model`."""
    for cache in caches(model):
        cache.commit()


def reset_caches(model: nn.Module) -> None:
    """Empty every cache of `model`, as the paper does before fine-tuning a detector."""
    for cache in caches(model):
        cache.reset_cache()


@checked
def resize_caches(model: nn.Module, length: int, size: tuple[int, int] | None = None) -> None:
    """Interpolate every cache of `model` to `length` slots (ValueError: it has none, or a bad length)."""
    found = list(caches(model))
    if not found:
        raise ValueError(f"{type(model).__name__} has no shared cache; add_memory(model, 'grc') gives it one")
    for cache in found:
        check_size(length, size, cache.prefix)
    for cache in found:
        cache.resize_cache(length, size)


def shuffle_caches(model: nn.Module, generator: torch.Generator | None = None) -> None:
    """Permute all entries of every cache: a control that keeps the values and destroys their meaning."""
    for cache in caches(model):
        cache.commit()
        flat = cache.cache_MC.flatten()
        order = torch.randperm(flat.numel(), generator=generator).to(flat.device)
        with torch.no_grad():
            cache.cache_MC.copy_(flat[order].view_as(cache.cache_MC))
        cache.propose_current()


@contextlib.contextmanager
def hold_caches(model: nn.Module) -> Iterator[None]:
    """Inside, training forwards compute with the caches as they are and leave no proposals.

    For forwards that must not count as a step, and where several share one backward under activation checkpointing.
    """
    before = [(c, c.held) for c in caches(model)]
    for cache, _ in before:
        cache.commit()
        cache.held = True
    try:
        yield
    finally:
        for cache, held in before:
            cache.held = held
