"""Weights of modules, for code that uses them without calling the module, or calls it with others.

Adapters wrap such modules, quantisation replaces them, and hooks watch them. Then `module.weight` is not the weight in
use, and only a call is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

Weights = tuple[Tensor, Tensor | None] | None
"""Weight and bias of a plain linear map."""


def weights_of(linear: Any) -> Weights:
    """Weight and bias of an nn.Linear; None for its replacements (adapters, quantised or parametrised layers)."""
    plain = type(linear) in (nn.Linear, NonDynamicallyQuantizableLinear)
    # Composite tensors (quantised, or sharded by FSDP) are no plain matrices.
    return (linear.weight, linear.bias) if plain and not hasattr(linear.weight, "__tensor_flatten__") else None


def is_spread(linear: Any) -> bool:
    """True if the weight is sharded over processes (a `DTensor`): only a call sums the input's gradients over them."""
    return hasattr(getattr(linear, "weight", None), "full_tensor")


def plain_weights(linear: Any) -> Weights:
    """`weights_of` for a module without hooks or a patched forward, so that its call can be skipped."""
    watched = linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks
    return None if watched or "forward" in vars(linear) else weights_of(linear)


def matrix_of(linear: Any) -> tuple[Tensor, Tensor | None]:
    """Weight (out, in) and bias (out,) of a linear map, with gradients.

    They are the module's own if it is plain, else its results for the unit vectors and for 0.
    """
    plain = plain_weights(linear)
    if plain is not None:
        return plain
    like = next(linear.parameters(), torch.empty(0))
    unit_II = torch.eye(linear.in_features, dtype=input_dtype(linear), device=like.device)
    image_ZO = linear(torch.cat([torch.zeros_like(unit_II[:1]), unit_II]))
    bias_O = None if getattr(linear, "bias", None) is None else image_ZO[0]
    return (image_ZO[1:] - image_ZO[:1]).mT, bias_O


@torch.no_grad()
def first_columns(linear: nn.Module, inputs: int, count: int) -> Tensor:
    """(out, count): a linear map's first columns, by its results for unit vectors; of columns that it lacks, 0."""
    device = next(linear.parameters(), torch.empty(0)).device
    unit_ZI = torch.eye(count, inputs, dtype=input_dtype(linear), device=device)
    image_ZO = linear(F.pad(unit_ZI, (0, 0, 1, 0))[None])[0]
    return (image_ZO[1:] - image_ZO[:1]).mT


def side_by_side(linears: Sequence[Any]) -> partial[Tensor]:
    """One linear map with the outputs of several, by a copy of their present weights.

    The copy lies as (in, out): a product of one row reads a matrix that no cache holds a third faster in that order.
    """
    maps = [matrix_of(linear) for linear in linears]
    bias = torch.cat([weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in maps])
    return partial(F.linear, weight=torch.cat([weight.mT for weight, _ in maps], 1).mT, bias=bias)


def input_dtype(linear: nn.Module) -> torch.dtype:
    """Return the dtype of a linear map's input; packed low-bit weights have no dtype to copy."""
    found = (p.dtype for p in linear.parameters() if p.is_floating_point())
    return next(found, torch.get_default_dtype())


def call_with(module: nn.Module, tensors: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
    """Call a module with other parameters and buffers; `tensors` receives buffers that the call exchanges.

    A copy is called: `functional_call`, which compilers and patched forwards need, shows others the exchange.
    """
    if torch.compiler.is_compiling() or any("forward" in vars(part) for part in module.modules()):
        return functional_call(module, tensors, args, kwargs)
    twin = _twin(module, tensors, "")
    out = twin(*args, **kwargs)
    tensors.update(twin.named_buffers(remove_duplicate=False))
    return out


def _twin(module: nn.Module, tensors: dict[str, Tensor], path: str) -> nn.Module:
    twin = copy(module)
    twin._modules = {n: child and _twin(child, tensors, f"{path}{n}.") for n, child in module._modules.items()}
    for kind in ("_parameters", "_buffers"):
        setattr(twin, kind, {n: tensors.get(path + n, tensor) for n, tensor in getattr(module, kind).items()})
    return twin
