"""Projections cut up over processes by their outputs and inputs (tensor parallel; Megatron-LM, arXiv:1909.08053).

Of P processes each has H / P heads of every attention layer and F / P hidden units of every feed-forward:

    y = sum_p  softmax(q_p k_p^T) v_p W_o,p + b_o        q_p, k_p, v_p = x W_qkv,p
    z = sum_p  act(x W_1,p) W_2,p + b_2

with one sum over processes forward and one backward for each of both. It is torch's plan of `ColwiseParallel` and
`RowwiseParallel` for the linear layers of a block. All else is whole on every process: embeddings, norms, the residual
stream, the head, and a memory that knows nothing of heads. Every process reads the same rows; with its own keys and
values of them, where a memory stores hidden states and asks the layer for these.

A fused projection has its queries, keys and values one below the other, of which a share would be all queries. Its rows
are put into another order first, those of a process together; `whole_weights` puts them back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cached_transformers.attentions.softmax import SoftmaxAttention
from cached_transformers.layers.attention import SelfAttention
from cached_transformers.layers.block import Block
from cached_transformers.layers.feed_forward import FeedForward
from cached_transformers.layers.stack import Stack
from cached_transformers.positions import LearnedPositions, Positions, RotaryPositions, SinusoidalPositions

from .sharding import is_cut, together

WHOLE = frozenset({"state", "tokens_round", "context", "bias", "token_ids", "slots", "slots_in_front"})
"""What a memory may need (`seam/fit.py`) that has no part in heads, but for keys and values that a layer makes itself.
What every layer makes of a segment ("layer_traces") is no part either, if no keys are made of it (armt; crtn chooses by
them, of all heads)."""
NO_HEADS = (Positions, LearnedPositions, SinusoidalPositions, RotaryPositions)
"""Position schemes that do to every head the same."""


def tensor_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    """Cut the projections of a model up, in place; their parameters become `DTensor`s.

    What is replicated must be alike on all processes: weights before the call, and random states where there is dropout
    (each process drops the same units of its own heads). Optimisers that go through parameters by groups need those
    that are cut in a group of their own: `[{"params": cut}, {"params": whole}]`, told by `sharding.is_cut`.

    Args:
        model: one with a `Stack` of plain blocks: `language_model`, `sequence_classifier`, `vision_transformer`, an
            encoder; on its device.
        mesh: one-dimensional, as `init_device_mesh(device, (P,))` gives it.

    Returns:
        The model.

    Raises:
        ValueError: heads or hidden units do not divide by P; or something in the model works on all heads, or on other
            weights than these; the message says what. The model is as it was.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    stacks = [module for module in model.modules() if isinstance(module, Stack)]
    if not stacks:
        raise ValueError(
            f"tensor_parallel cuts up the blocks of a Stack, and {type(model).__name__} has none; take FSDP"
        )
    for stack in stacks:
        _check(stack, mesh.size())
    for stack in stacks:
        for block in stack.blocks:
            attention, feed_forward = _parts(block)
            for linear, shares in _fused(attention, feed_forward):
                _reorder(linear, shares, mesh.size())
            plan: dict[str, Any] = {"qkv": ColwiseParallel(), "output": RowwiseParallel()}
            parallelize_module(attention, mesh, plan)
            parallelize_module(feed_forward, mesh, {"enter": ColwiseParallel(), "leave": RowwiseParallel()})
            attention.heads //= mesh.size()
            attention.kv_heads //= mesh.size()
            attention.inner //= mesh.size()
    return model


@torch.no_grad()
def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """The state dictionary of the model before it was cut up, with the weights as they are now; all must ask."""
    return {name: whole(model, name, tensor).clone() for name, tensor in model.state_dict().items()}


@torch.no_grad()
def whole(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """One parameter of a model that is cut up, its gradient, or a state of the optimiser as large, in its own order."""
    full = together(tensor)
    if not is_cut(tensor):
        return full
    at, _, kind = name.rpartition(".")
    owner, _, part = at.rpartition(".")
    module: Any = model.get_submodule(owner)
    for linear, shares in _fused(module, module):
        if linear is module._modules[part] and (kind == "weight" or kind == "bias"):
            parts = full.chunk(tensor.device_mesh.size())  # type: ignore[attr-defined]
            pieces = zip(*(_pieces(part, shares) for part in parts), strict=True)
            return torch.cat([rows for piece in pieces for rows in piece])
    return full


def _fused(attention: Any, feed_forward: Any) -> Iterator[tuple[nn.Linear, list[int]]]:
    """Projections that are several in one, and how large each is, as shares of the whole."""
    if isinstance(attention, SelfAttention):
        yield attention.qkv, attention._projected()
    if isinstance(feed_forward, FeedForward):
        yield feed_forward.enter, [1] * (1 + feed_forward.gated)


@torch.no_grad()
def _reorder(linear: nn.Linear, shares: list[int], size: int) -> None:
    """Let the rows of each process stand together: of every projection its share."""
    for parameter in (linear.weight, linear.bias):
        if parameter is not None:
            parts = zip(*(piece.chunk(size) for piece in _pieces(parameter, shares)), strict=True)
            parameter.copy_(torch.cat([rows for part in parts for rows in part]))


def _pieces(t: Tensor, shares: list[int]) -> tuple[Tensor, ...]:
    """Rows of each of the projections."""
    return t.split([len(t) // sum(shares) * share for share in shares])


def _parts(block: Any) -> tuple[SelfAttention, FeedForward]:
    return block.attention, block.feed_forward


def _check(stack: Stack, size: int) -> None:
    """Refuse what does not stay what it is where heads are elsewhere (ValueError)."""
    _refuse(type(stack.model_memory).__name__, stack.model_memory.needs)
    for block in stack.blocks:
        if type(block) is not Block or type(block.attention) is not SelfAttention:
            kind = type(block if type(block) is not Block else block.attention).__name__
            raise ValueError(f"tensor_parallel knows plain blocks, and not {kind}; {_OUT}")
        attention, feed_forward = _parts(block)
        _refuse(type(attention.memory).__name__, attention.memory.needs)
        for name, part, known in (
            ("attention", attention.core, (SoftmaxAttention,)),
            ("the position scheme", attention.positions, NO_HEADS),
            ("feed-forward", feed_forward, (FeedForward,)),
        ):
            if type(part) not in known:
                raise ValueError(
                    f"{name} {type(part).__name__} has weights, draws or patterns of its own for heads or units; "
                    f"tensor_parallel cuts up {', '.join(k.__name__ for k in known)} (positions='rotary', and "
                    f"relative=False of a memory with a scheme of its own); {_OUT}"
                )
        if attention.reduction is not None or block.memory_weights is not None:
            raise ValueError(
                f"a block with a reduction, or with weights for memory tokens, has other projections; {_OUT}"
            )
        if isinstance(attention.output, nn.Identity):
            raise ValueError(f"project_output=False leaves no sum over heads, which would bring them together; {_OUT}")
        for linear in (attention.qkv, attention.output, feed_forward.enter, feed_forward.leave):
            if type(linear) is not nn.Linear or is_cut(linear.weight):
                raise ValueError(f"a projection is a {type(linear).__name__}, wrapped or cut up already; {_OUT}")
        heads = {"heads": attention.heads, "kv_heads": attention.kv_heads}
        for name, value in {**heads, "feed_forward": feed_forward.leave.in_features}.items():
            if value % size:
                raise ValueError(f"{name}={value} must be a multiple of the {size} processes of the mesh")


_OUT = "take data-parallel training (training.parallel=ddp or fsdp)"


def _refuse(name: str, needs: frozenset[str]) -> None:
    known = WHOLE if "context" in needs else WHOLE | {"layer_traces"}
    if others := sorted(needs - known):
        raise ValueError(
            f"memory {name} needs {', '.join(repr(word) for word in others)} (`seam/fit.py`), which it takes of all "
            f"heads, or without a gradient that is summed over processes; {_OUT}, or a memory beside the heads, as rmt"
        )
