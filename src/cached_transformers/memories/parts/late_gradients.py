"""One weight gradient for a linear map that is called many times with a few tokens.

Each call would make a gradient as large as the weight. Deferred until all calls have theirs, they are one product:

    dW = sum_i g_i^T x_i = [g_1; g_2; ..]^T [x_1; x_2; ..]

The weight enters all calls through one node of the graph, whose backward autograd runs after that of all calls, which
have left their rows in it; so the gradient arrives as usual, hooks and DDP included.

Legend: K inputs, O outputs of a map.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from cached_transformers.linear_maps import is_spread, matrix_of, plain_weights


class _Here(threading.local):
    maps: dict[nn.Module, _LateMap | None] | None = None
    of_segments: dict[nn.Module, _LateMap | None] | None = None


_here = _Here()


@contextlib.contextmanager
def late_gradients(on: bool = True, *, segments: bool = False) -> Iterator[None]:
    """Defer the weight gradients of maps that are called by `mapped` inside; with `on=False` not.

    It has no effect without gradient, under autocast, in compiled code or under transforms (`torch.func`), nor on maps
    with adapters, quantised or parametrised weights, hooks, or without training. With `segments` it is for a loop over
    segments, and for calls with `segments=True`: of maps with far more weights than a segment has numbers for them.
    """
    if torch.compiler.is_compiling():
        yield
        return
    name, transformed = "of_segments" if segments else "maps", torch._C._functorch.peek_interpreter_stack() is not None
    before = getattr(_here, name)
    setattr(_here, name, {} if on and torch.is_grad_enabled() and not transformed else None)
    try:
        yield
    finally:
        setattr(_here, name, before)


def mapped(linear: Any, x: Tensor, first: int = 0, last: int | None = None, *, segments: bool = False) -> Tensor:
    """Apply a linear map to x (..., K); only its outputs first .. last, (..., last - first), if given."""
    maps = None if torch.compiler.is_compiling() else _here.of_segments if segments else _here.maps
    if maps is not None and torch.is_grad_enabled():
        if linear not in maps:
            plain = plain_weights(linear)
            trains = plain is not None and plain[0].requires_grad and not torch.is_autocast_enabled(x.device.type)
            maps[linear] = _LateMap(*plain) if plain is not None and trains else None
        late = maps[linear]
        if late is not None:
            part = None if first == 0 and last in (None, linear.out_features) else slice(first, last)
            y: Tensor = _Call.apply(x, late.weight_OK, late.bias_O, late.rows, part)
            return y
    if first == 0 and last is None:
        return linear(x)  # type: ignore[no-any-return]
    if is_spread(linear):
        return linear(x)[..., first:last]  # type: ignore[no-any-return]
    weight_OK, bias_O = matrix_of(linear)
    return F.linear(x, weight_OK[first:last], None if bias_O is None else bias_O[first:last])


class _Rows:
    """Inputs and gradients of the calls of one map, by the requested outputs."""

    def __init__(self) -> None:
        self.backward, self.found = -1, dict[Any, list[tuple[Tensor, Tensor]]]()

    def add(self, part: slice | None, x_NK: Tensor, grad_NO: Tensor) -> None:
        backward = torch._C._current_graph_task_id()
        if backward != self.backward:  # left by a backward without the weight's gradient
            self.backward, self.found = backward, {}
        self.found.setdefault(None if part is None else (part.start, part.stop), []).append((x_NK, grad_NO))


class _LateMap:
    """Weight and bias of a map, as inputs of its calls."""

    def __init__(self, weight_OK: Tensor, bias_O: Tensor | None) -> None:
        self.rows = _Rows()
        self.weight_OK, self.bias_O = _Once.apply(self.rows, weight_OK, bias_O)


class _Once(torch.autograd.Function):
    """Identity on the weights; the backward computes their gradient from the rows of all calls."""

    @staticmethod
    def forward(ctx: Any, rows: _Rows, weight_OK: Tensor, bias_O: Tensor | None) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.rows, ctx.shape = rows, weight_OK.shape
        return weight_OK.view_as(weight_OK), None if bias_O is None else bias_O.view_as(bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *none: None) -> tuple[None, Tensor | None, Tensor | None]:
        found, ctx.rows.found = ctx.rows.found, {}
        weight_OK = bias_O = None
        for bounds, calls in found.items():
            part = None if bounds is None else slice(*bounds)
            x_NK, grad_NO = (torch.cat(rows) for rows in zip(*calls, strict=True))
            if found.keys() == {None}:
                return None, grad_NO.mT.mm(x_NK), grad_NO.sum(0) if ctx.needs_input_grad[2] else None
            if weight_OK is None:
                weight_OK, bias_O = grad_NO.new_zeros(ctx.shape), grad_NO.new_zeros(ctx.shape[:1])
            _part(weight_OK, part).addmm_(grad_NO.mT, x_NK)
            _part(bias_O, part).add_(grad_NO.sum(0))
        return None, weight_OK, bias_O if ctx.needs_input_grad[2] else None


class _Call(torch.autograd.Function):
    """The map; its backward leaves its rows for `_Once`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_OK: Tensor, bias_O: Tensor | None, rows: _Rows, part: slice | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight_OK)
        ctx.rows, ctx.part = rows, part
        return F.linear(x, _part(weight_OK, part), None if bias_O is None else _part(bias_O, part))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        x, weight_OK = ctx.saved_tensors
        grad_NO = grad.reshape(-1, grad.shape[-1])
        ctx.rows.add(ctx.part, x.reshape(-1, x.shape[-1]), grad_NO)
        x_grad = grad_NO.mm(_part(weight_OK, ctx.part)).view_as(x) if ctx.needs_input_grad[0] else None
        return x_grad, None, None, None, None


def _part(t: Any, outputs: slice | None) -> Any:
    return t if outputs is None else t[outputs]
