"""Weight gradients of linear maps that are called with a few tokens many times, made by one product.

A memory that reads token by token calls each map once a token, and each call has a gradient of the weight, as large as
the weight and made of a few rows. Put off until all calls have theirs, they are one product of all rows:

    dW = sum_i g_i^T x_i = [g_1; g_2; ..]^T [x_1; x_2; ..]

The weight enters the calls through one node of the graph. Autograd carries out that node's backward behind those of all
calls, each of which has left its rows there; so the gradient arrives where it always does, hooks and DDP included.

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
    maps: dict[nn.Module, _Map | None] | None = None


_here = _Here()


@contextlib.contextmanager
def late_gradients(on: bool = True) -> Iterator[None]:
    """Maps that are called by `mapped` inside have their weight gradients made at once; with `on=False` not.

    It does nothing without gradient, under autocast and in compiled code, nor for maps whose weights are not their own
    (adapters, quantised and parametrised ones), that are watched by hooks, or that are not trained.
    """
    if torch.compiler.is_compiling():
        yield
        return
    before, _here.maps = _here.maps, {} if on and torch.is_grad_enabled() else None
    try:
        yield
    finally:
        _here.maps = before


def mapped(linear: Any, x: Tensor, first: int = 0, last: int | None = None) -> Tensor:
    """A linear map of x (..., K), or its outputs first .. last alone, (..., last - first)."""
    if not torch.compiler.is_compiling() and _here.maps is not None and torch.is_grad_enabled():
        if linear not in _here.maps:
            _here.maps[linear] = _late(linear, x)
        late = _here.maps[linear]
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
    """Inputs and gradients of the calls of one map, by the outputs that were asked for."""

    def __init__(self) -> None:
        self.backward, self.found = -1, dict[Any, list[tuple[Tensor, Tensor]]]()

    def add(self, part: slice | None, x_NK: Tensor, grad_NO: Tensor) -> None:
        backward = torch._C._current_graph_task_id()
        if backward != self.backward:  # what a backward that did not ask for the weight has left
            self.backward, self.found = backward, {}
        self.found.setdefault(None if part is None else (part.start, part.stop), []).append((x_NK, grad_NO))


class _Map:
    """Weight and bias of a map, as the calls take them."""

    def __init__(self, weight_OK: Tensor, bias_O: Tensor | None) -> None:
        self.rows = _Rows()
        self.weight_OK, self.bias_O = _Once.apply(self.rows, weight_OK, bias_O)


def _late(linear: Any, x: Tensor) -> _Map | None:
    plain = plain_weights(linear)
    if plain is None or not plain[0].requires_grad or torch.is_autocast_enabled(x.device.type):
        return None
    return _Map(*plain)


class _Once(torch.autograd.Function):
    """The weights as they are; their gradient is made of what the calls have left."""

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
            if weight_OK is None:
                weight_OK, bias_O = grad_NO.new_zeros(ctx.shape), grad_NO.new_zeros(ctx.shape[:1])
            _part(weight_OK, part).addmm_(grad_NO.mT, x_NK)
            _part(bias_O, part).add_(grad_NO.sum(0))
        return None, weight_OK, bias_O if ctx.needs_input_grad[2] else None


class _Call(torch.autograd.Function):
    """The map, whose backward leaves its rows for `_Once`."""

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
