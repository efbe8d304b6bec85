"""Reversible residual layers: recompute activations from the result instead of keeping them.

Gomez et al. 2017 (arXiv:1707.04585), for attention Kitaev et al. 2020 (arXiv:2001.04451, section 3; code in
google/trax). Two streams, both initialised with the input, are updated in turns:

    (a, b) -> (b, a + F_i(b))        undone by   (a, b) -> (b - F_i(a), a)

where F_1, F_2, .. are the attention and the feed-forward of each block; the result is the mean of both. In training a
stack keeps 2 B N D numbers for any depth and computes each sublayer twice. Recomputed values differ by rounding, about
1e-6 of the values in float32.

Legend: B rows, N tokens, D model width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class Sublayer(NamedTuple):
    """A function added to the other stream, and its parameters."""

    run: Callable[[Tensor], tuple[Tensor, Tensor]]  # (B, N, D) -> (B, N, D) and an auxiliary loss
    parameters: Sequence[nn.Parameter]


def reversible(sublayers: Sequence[Sublayer], x_BND: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of both streams (B, N, D), and the sum of the auxiliary losses.

    The backward returns each parameter's gradient once, for DistributedDataParallel. Under torch.compile layers run
    plainly: the compiler decides about recomputation.
    """
    parameters = [p for sublayer in sublayers for p in sublayer.parameters if p.requires_grad]
    kept = torch.is_grad_enabled() and (x_BND.requires_grad or bool(parameters))
    if torch.compiler.is_compiling() or not kept:
        a_BND, b_BND, loss = _forward(sublayers, x_BND)
    else:
        a_BND, b_BND, loss = _Reversible.apply(sublayers, x_BND, *dict.fromkeys(parameters))
    return (a_BND + b_BND) / 2, loss


def _forward(
    sublayers: Sequence[Sublayer], x_BND: Tensor, before: Callable[[], None] = lambda: None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the sublayers on both streams; `before` is called before each."""
    a_BND = b_BND = x_BND
    losses = x_BND.new_zeros((), dtype=torch.promote_types(x_BND.dtype, torch.float32))
    for sublayer in sublayers:
        before()
        y_BND, loss = sublayer.run(b_BND)
        a_BND, b_BND, losses = b_BND, a_BND + y_BND, losses + loss
    return a_BND, b_BND, losses


class _Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sublayers: Sequence[Sublayer], x_BND: Tensor, *parameters: nn.Parameter) -> Any:
        kind = x_BND.device.type
        ctx.sublayers, ctx.parameters, ctx.random = sublayers, parameters, []
        ctx.autocast = {"device_type": kind, "enabled": torch.is_autocast_enabled(kind)}
        ctx.autocast["dtype"] = torch.get_autocast_dtype(kind)
        a_BND, b_BND, loss = _forward(sublayers, x_BND, lambda: ctx.random.append(_random_state(x_BND.device)))
        ctx.save_for_backward(a_BND, b_BND)
        return a_BND.clone(), b_BND.clone(), loss  # saved tensors may not be outputs

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, da_BND: Tensor, db_BND: Tensor, dloss: Tensor) -> Any:
        a_BND, b_BND = ctx.saved_tensors
        grads: dict[nn.Parameter, Tensor | None] = dict.fromkeys(ctx.parameters)
        for sublayer, random in zip(reversed(ctx.sublayers), reversed(ctx.random), strict=True):
            trained = [p for p in dict.fromkeys(sublayer.parameters) if p.requires_grad]
            x_BND = a_BND.detach().requires_grad_()
            with torch.enable_grad(), _random(random, x_BND.device), torch.autocast(**ctx.autocast):
                y_BND, loss = sublayer.run(x_BND)
            outputs = [(y_BND, db_BND.to(y_BND.dtype)), (loss, dloss.to(loss.dtype))]
            outputs = [(out, grad) for out, grad in outputs if out.requires_grad]
            found = torch.autograd.grad(
                [out for out, _ in outputs], [x_BND, *trained], [grad for _, grad in outputs], allow_unused=True
            )
            for parameter, grad in zip(trained, found[1:], strict=True):
                before = grads[parameter]
                grads[parameter] = grad if before is None else before if grad is None else before + grad
            a_BND, b_BND = b_BND - y_BND.detach(), a_BND
            da_BND, db_BND = db_BND, da_BND if found[0] is None else da_BND + found[0]
        return None, da_BND + db_BND, *grads.values()


def _random_state(device: torch.device) -> list[Tensor]:
    """States of the random generators of the CPU and the device."""
    of_device = [] if device.type == "cpu" else [torch.get_device_module(device).get_rng_state(device)]
    return [torch.get_rng_state(), *of_device]


@contextlib.contextmanager
def _random(states: list[Tensor], device: torch.device) -> Iterator[None]:
    """Restore random states inside the block, and the current ones afterwards."""
    on = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(on, device_type="cuda" if device.type == "cpu" else device.type):
        torch.set_rng_state(states[0])
        if on:
            torch.get_device_module(device).set_rng_state(states[1], device)
        yield
