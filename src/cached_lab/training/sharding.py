"""Weights, gradients and optimiser states cut up over processes by FSDP2 (`fully_shard`), round a loop over segments.

`fully_shard` of a block gathers its weights when the block is called, and scatters its gradient when the backward of
that call is over: over S segments, S times. Here the groups of weights are still the blocks, but what FSDP sees called
is what holds them, one inside the other, with the whole loop innermost:

    Shards( Held(block_1)( Held(block_2)( ... loop(model) ... )))

so that a step has one forward and one backward for FSDP, whatever the number of segments: each weight is gathered
once, each gradient reduced and scattered once (`reshard_after_forward=False`). Inside, a model has its plain weights,
wherever it uses them: in a memory that asks a layer's projections from outside, in the recomputation of an activation
checkpoint or a `ReplayLoop`, in a window that slides. Between steps a process has 1 / P of weights, gradients,
optimiser states and averaged weights; within a step it has all weights, and at its end all gradients.

With bfloat16, weights of linear layers are gathered in it, which is what autocast makes of them before each use, so
that they cost half the bytes and change nothing; gradients are added up over processes in float32. All other parameters
are gathered as they are, since a norm takes a float32 stream and float32 weights; so is the first of a stack, whose
type states have.

Parameters that several blocks share are in the outermost group, with embeddings and head. Buffers, shared caches among
them, are whole on every process, and those of the first are sent to the others before each forward, as DDP does.
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


class _Held(nn.Module):
    """A group of weights: gathered while what it is called with runs."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)


class _Root(nn.Module):
    """The outermost group: what is in no block."""

    def __init__(self, model: nn.Module, held: list[_Held]) -> None:
        super().__init__()
        self.model, self.held = model, nn.ModuleList(held)

    def forward(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def step(index: int, *args: Any, **kwargs: Any) -> Any:
            if index == len(self.held):
                return inner(*args, **kwargs)
            return self.held[index](step, index + 1, *args, **kwargs)

        return step(0, *args, **kwargs)


class Shards:
    """A model whose weights are cut up, in place: its parameters become `DTensor`s, sharded in their first dimension.

    Every process must make it, and call its methods, alike.

    Args:
        model: on its device, with plain parameters; those of the first process count. world: of two processes or more.
        shares: P, into how many parts the weights are cut; None for one a process. Fewer leave as many copies of the
            model as there are times P processes, neighbours sharing one, and gradients are averaged over copies, too
            (hybrid sharding): weights are gathered among P processes, as those of one machine, alone.
        half: the type in which autocast computes; None for full precision.

    Attributes:
        groups: how many groups of weights there are beside the outermost one.

    Raises:
        ValueError: a parameter that cannot be cut up, or a version of torch that cannot do it.
    """

    def __init__(
        self, model: nn.Module, world: World, half: torch.dtype | None = None, shares: int | None = None
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        _check(model)
        shares = world.size if shares is None else shares
        if world.size % shares:
            raise ValueError(
                f"training.shares={shares} must divide the {world.size} processes, so that each copy of the weights is "
                "whole; null cuts them up over all"
            )
        self.model, self._world = model, world
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor, 0)
        for cache in caches(model):
            if cache.sync == "none":  # buffers are overwritten by those of the first process before each forward
                cache.propose_current()
        self._outline = _without_weights(model)
        sizes = (world.size,) if shares == world.size else (world.size // shares, shares)
        mesh = init_device_mesh(world.device.type, sizes, mesh_dim_names=("copies", "shares")[-len(sizes) :])
        held: list[Any] = []
        for block, names, kind in _groups(model, half):
            group = {p for name, p in block.named_parameters() if name in names}
            held.append(_fully_shard(_Held(block), mesh, set(block.parameters()) - group, kind))
        taken = {p for p in model.parameters() if is_cut(p)}
        self._root: Any = _fully_shard(_Root(model, held), mesh, taken, None)
        self.groups = len(held)

    def round(self, loop: nn.Module) -> Sharded:
        """What is called in the place of `loop`, a module round the model, or of the model itself."""
        return Sharded(self, loop)

    def set_last(self, last: bool) -> None:
        """Whether the next backward is the last of the step: it reduces gradients and lets go of gathered weights."""
        self._root.set_requires_gradient_sync(last)
        self._root.set_reshard_after_backward(last)
        self._root.set_is_last_backward(last)

    def call(self, loop: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What `loop` returns, called with all weights gathered."""
        self._share_buffers()
        return self._root(loop, *args, **kwargs)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """A `with` block in which the model has its plain weights, for what needs no gradient."""
        parts = [self._root, *self._root.held]
        for part in parts:
            part.unshard()
        try:
            yield
        finally:
            for part in parts:
                part.reshard()

    @torch.no_grad()
    def whole(self, source: nn.Module | None = None) -> nn.Module:
        """A plain model with all weights and buffers, on every process.

        Args:
            source: the model, or one that was copied from it since; None for the model.
        """
        source = self.model if source is None else source
        commit_caches(source)
        plain = copy.deepcopy(self._outline)
        outlines = list(plain.parameters())  # kept, so that none of their numbers goes to another object
        made: dict[int, nn.Parameter] = {}
        for own, other in zip(plain.modules(), source.modules(), strict=True):
            for name, parameter in own._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in made:
                    value = other._parameters[name]
                    assert value is not None
                    full = together(value) if is_cut(value) else value.clone()
                    made[id(parameter)] = nn.Parameter(full, requires_grad=value.requires_grad)
                own._parameters[name] = made[id(parameter)]
            for name, buffer in other._buffers.items():
                own._buffers[name] = None if buffer is None else buffer.clone()
        del outlines
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


class Sharded(nn.Module):
    """A loop, called with all weights gathered; the counterpart of DistributedDataParallel."""

    def __init__(self, shards: Shards, loop: nn.Module) -> None:
        super().__init__()
        self.loop = loop
        self._shards = shards

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._shards.call(self.loop, *args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A `with` block whose backward adds to gradients that stay where they are, as other pieces follow."""
        self._shards.set_last(False)
        try:
            yield
        finally:
            self._shards.set_last(True)


def blocks(model: nn.Module) -> list[nn.Module]:
    """Parts with weights of the outermost lists of modules: the layers of a stack, or the stages of a pyramid."""
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            found += [part for part in child if next(part.parameters(), None) is not None]
        else:
            found += blocks(child)
    return list(dict.fromkeys(found))


def cut_like(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors by name, which every process has, with those cut up that are cut up in the model."""
    own = model.state_dict()
    return {name: cut_as(tensor, own.get(name)) for name, tensor in weights.items()}


def cut_as(tensor: Tensor, like: Tensor | None) -> Tensor:
    """A whole tensor, cut up as another one is, if that is."""
    if like is None or not is_cut(like) or is_cut(tensor) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    like_cut: Any = like
    return distribute_tensor(tensor.to(like.device), like_cut.device_mesh, like_cut.placements, src_data_rank=None)


def is_cut(tensor: Tensor) -> bool:
    """Whether processes have parts of it: a `DTensor`, told by its methods, as its module takes long to import."""
    return hasattr(tensor, "full_tensor")


def together(tensor: Tensor) -> Tensor:
    """The whole of a tensor; every process must ask."""
    whole: Tensor = tensor.full_tensor() if is_cut(tensor) else tensor  # type: ignore[attr-defined]
    return whole


def whole_norm(norm: Tensor) -> float:
    """A norm over parameters that may be cut up, as a number; every process must ask."""
    return float(together(norm))


def _fully_shard(module: nn.Module, mesh: Any, ignored: set[nn.Parameter], half: torch.dtype | None) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(
        param_dtype=half, reduce_dtype=None if half is None else torch.float32, cast_forward_inputs=False
    )
    return fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=policy, ignored_params=ignored)


def _groups(model: nn.Module, half: torch.dtype | None) -> list[tuple[nn.Module, set[str], torch.dtype | None]]:
    """Blocks, names of parameters of theirs that are gathered together, and in which type (None: their own)."""
    parts = blocks(model)
    uses = Counter(id(p) for part in parts for p in part.parameters())
    outside = _outside(model, parts)
    inside = {module for part in parts for module in part.modules()}
    # Of the first parameter of a stack a new state takes its type.
    typing = {id(p) for m in model.modules() if m not in inside and (p := next(m.parameters(), None)) is not None}
    found: list[tuple[nn.Module, set[str], torch.dtype | None]] = []
    for part in parts:
        own = {name for name, p in part.named_parameters() if uses[id(p)] == 1 and id(p) not in outside}
        linear = {
            f"{name}.{kind}".lstrip(".")
            for name, module in part.named_modules()
            if half is not None and type(module) is nn.Linear
            for kind, p in module.named_parameters()
            if id(p) not in typing
        }
        found += [(part, names, kind) for names, kind in ((own & linear, half), (own - linear, None)) if names]
    return found


def _outside(model: nn.Module, parts: list[nn.Module]) -> set[int]:
    """Parameters that modules beside these parts have."""
    inside = {module for part in parts for module in part.modules()}
    return {id(p) for m in model.modules() if m not in inside for p in m._parameters.values() if p is not None}


def _without_weights(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters have shapes and no values; buffers are copied."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, memo)


def _check(model: nn.Module) -> None:
    if tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2]) < (2, 7):
        raise ValueError(
            f"training.parallel='fsdp' needs torch 2.7 or later (ignored_params of fully_shard), this is "
            f"{torch.__version__}; take training.parallel=ddp"
        )
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise ValueError(
                f"training.parallel='fsdp' cuts parameters up in their first dimension, and {name} has none; take "
                "training.parallel=ddp, or a memory without that parameter"
            )
        if parameter.is_complex() or not parameter.is_floating_point():
            raise ValueError(
                f"training.parallel='fsdp' cuts up parameters of real numbers, and {name} is {parameter.dtype}; take "
                "training.parallel=ddp"
            )
