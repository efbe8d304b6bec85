"""Fully sharded weights, gradients and optimiser states (FSDP2, `fully_shard`) around a loop over segments.

`fully_shard` on a block would gather its weights at every call and scatter its gradient after every backward: S times
for S segments. Here each block's weights belong to a wrapper module, and the wrappers call each other with the whole
loop innermost:

    root( group_1( group_2( ... loop(model) ... )))

FSDP therefore sees one forward and one backward per step (`reshard_after_forward=False`). Inside the loop the model has
plain weights, so that memories may use a layer's projections from outside and activations may be recomputed. Between
steps each of P processes holds 1 / P of weights, gradients, optimiser states and averaged weights; during a step all
weights and, at its end, all gradients. Parameters shared by several blocks belong to the outermost group, with
embeddings and head. Buffers, including shared caches, are whole on every process and broadcast from the first before
each forward, as in DDP.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cached_transformers.memories.grc.shared_cache import caches, commit_caches

from .distributed import World


class _Group(nn.Module):
    """A group of weights, gathered during the call it wraps."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)


class _RootGroup(nn.Module):
    """The outermost group: parameters outside of blocks."""

    def __init__(self, model: nn.Module, groups: list[_Group]) -> None:
        super().__init__()
        self.model, self.groups = model, nn.ModuleList(groups)

    def forward(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def call(index: int, *args: Any, **kwargs: Any) -> Any:
            if index == len(self.groups):
                return inner(*args, **kwargs)
            return self.groups[index](call, index + 1, *args, **kwargs)

        return call(0, *args, **kwargs)


class Shards:
    """Shard a model in place: its parameters become `DTensor`s, split in their first dimension.

    Every process must create it and call its methods alike.

    Args:
        model: on its device, with plain parameters; those of the first process are broadcast.
        world: two processes or more.

    Attributes:
        groups: number of groups of weights besides the outermost.

    Raises:
        ValueError: a parameter that cannot be sharded, or a version of torch without support.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        _check(model)
        self.model, self._world = model, world
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor, 0)
        for cache in caches(model):
            if cache.sync == "none":  # buffers are overwritten by those of the first process before each forward
                cache.propose_current()
        # A copy whose parameters have shapes and no values; buffers are copied.
        memo: dict[int, Any] = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()}
        self._outline = copy.deepcopy(model, memo)
        mesh = init_device_mesh(world.device.type, (world.size,))
        groups: list[Any] = []
        parts = blocks(model)
        uses = Counter(p for part in parts for p in set(part.parameters()))
        inside = {module for part in parts for module in part.modules()}
        shared = {p for module in model.modules() if module not in inside for p in module._parameters.values()}
        for part in parts:
            others = {p for p in part.parameters() if uses[p] > 1 or p in shared}
            groups.append(_fully_shard(_Group(part), mesh, others))
        taken = {p for p in model.parameters() if is_sharded(p)}
        self._root: Any = _fully_shard(_RootGroup(model, groups), mesh, taken)
        self.groups = len(groups)

    def wrap(self, loop: nn.Module) -> ShardedLoop:
        """Wrap the model or a loop around it, to be called with all weights gathered."""
        return ShardedLoop(self, loop)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather all weights for a `with` block without gradients."""
        parts = [self._root, *self._root.groups]
        for part in parts:
            part.unshard()
        try:
            yield
        finally:
            for part in parts:
                part.reshard()

    @torch.no_grad()
    def whole(self, source: nn.Module | None = None) -> nn.Module:
        """Return a plain model with all weights and buffers, on every process.

        Args:
            source: the model, or a copy of it; None for the model.
        """
        source = self.model if source is None else source
        commit_caches(source)
        full = {id(p): nn.Parameter(full_tensor(p).clone(), p.requires_grad) for p in source.parameters()}
        plain = copy.deepcopy(self._outline)
        for own, other in zip(plain.modules(), source.modules(), strict=True):
            own._parameters.update({n: None if p is None else full[id(p)] for n, p in other._parameters.items()})
            own._buffers.update({n: None if b is None else b.clone() for n, b in other._buffers.items()})
        for cache in caches(plain):
            cache._settle()
        plain.train(source.training)
        return plain

    @torch.no_grad()
    def _share_buffers(self) -> None:
        commit_caches(self.model)
        kinds: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self.model.buffers():
            kinds.setdefault(buffer.dtype, []).append(buffer)
        for buffers in kinds.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            dist.broadcast(flat, 0)
            if not self._world.main:
                for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                    buffer.copy_(part.view_as(buffer))


class ShardedLoop(nn.Module):
    """A loop called with all weights gathered; the counterpart of DistributedDataParallel."""

    def __init__(self, shards: Shards, loop: nn.Module) -> None:
        super().__init__()
        self.loop, self._shards = loop, shards

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._shards._share_buffers()
        return self._shards._root(self.loop, *args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in a `with` block, without reducing them or freeing gathered weights."""
        self._set_last(False)
        try:
            yield
        finally:
            self._set_last(True)

    def _set_last(self, last: bool) -> None:
        root = self._shards._root
        root.set_requires_gradient_sync(last)
        root.set_reshard_after_backward(last)
        root.set_is_last_backward(last)


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the members with weights of the outermost module lists: layers of a stack, or stages of a pyramid."""
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            found += [part for part in child if next(part.parameters(), None) is not None]
        else:
            found += blocks(child)
    return list(dict.fromkeys(found))


def shard_weights(model: nn.Module, weights: Mapping[str, Any]) -> dict[str, Tensor]:
    """Shard whole or stored tensors, by name, like those of the model."""
    own = model.state_dict()
    return {name: shard_like(tensor, own.get(name)) for name, tensor in weights.items()}


def shard_like(value: Any, like: Tensor | None) -> Tensor:
    """Shard a whole tensor, or `StoredShards`, like another tensor; whole if that is not sharded."""
    rows = getattr(value, "rows", lambda begin, end: value[begin:end].clone())
    if like is None or not is_sharded(like) or value.shape != like.shape:
        return rows(0, value.shape[0]) if hasattr(value, "rows") else value  # type: ignore[no-any-return]
    from torch.distributed.tensor import DTensor

    sharded: Any = like
    local = rows(begin := first_row(like), begin + len(sharded.to_local())).to(like.device)
    mesh, placements = sharded.device_mesh, sharded.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def first_row(tensor: Any) -> int:
    """Return the first row of this process' shard; every shard but the last ones has as many rows."""
    mesh, rows = tensor.device_mesh, int(tensor.shape[0])
    return min(int(mesh.get_local_rank()) * -(-rows // int(mesh.size())), rows)


def is_sharded(tensor: Tensor) -> bool:
    """Return True for a `DTensor`, recognised by a method, since its module is slow to import."""
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the whole tensor; every process must call this."""
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return whole


def _fully_shard(module: nn.Module, mesh: Any, ignored: set[nn.Parameter]) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    return fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=policy, ignored_params=ignored)


def _check(model: nn.Module) -> None:
    if tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2]) < (2, 7):
        raise ValueError(f"training.parallel='fsdp' needs torch 2.7, this is {torch.__version__}; use ddp")
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0 or not parameter.is_floating_point():
            shape = f"shape {tuple(parameter.shape)} and type {parameter.dtype}"
            raise ValueError(f"training.parallel='fsdp' divides rows of real numbers, {name} has {shape}; use ddp")
