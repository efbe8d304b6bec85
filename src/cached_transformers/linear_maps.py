"""Weights of linear maps, for code that does more with them than call the module.

Others wrap such modules (adapters), exchange them (quantisation) or watch them (hooks). Then the weight beside the name
is not what the module computes with, and only a call tells.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

Weights = tuple[Tensor, Tensor | None] | None
"""Weight and bias of a plain linear map."""


def weights_of(linear: Any) -> Weights:
    """Weight and bias of an nn.Linear; None for what replaces one (adapters, quantised or parametrised layers)."""
    plain = type(linear) in (nn.Linear, NonDynamicallyQuantizableLinear)
    # Tensors of several, as quantised ones and those that FSDP cuts up, are no matrices to compute with.
    return (linear.weight, linear.bias) if plain and not hasattr(linear.weight, "__tensor_flatten__") else None


def is_spread(linear: Any) -> bool:
    """Whether processes have parts of the weight (a `DTensor`): a call alone sums gradients of its input over them."""
    return hasattr(getattr(linear, "weight", None), "full_tensor")


def plain_weights(linear: Any) -> Weights:
    """`weights_of`, where nobody watches the calls or has patched them, so that they need not be made."""
    watched = linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks
    return None if watched or "forward" in vars(linear) else weights_of(linear)


def matrix_of(linear: Any) -> tuple[Tensor, Tensor | None]:
    """Weight (out, in) and bias (out,) of a linear map: its own where it is plain, else what the module makes of the
    unit vectors and of nothing, with gradients into whatever it is made of."""
    plain = plain_weights(linear)
    if plain is not None:
        return plain
    like = next(linear.parameters(), torch.empty(0))
    unit_II = torch.eye(linear.in_features, dtype=input_dtype(linear), device=like.device)
    image_ZO = linear(torch.cat([torch.zeros_like(unit_II[:1]), unit_II]))
    bias_O = None if getattr(linear, "bias", None) is None else image_ZO[0]
    return (image_ZO[1:] - image_ZO[:1]).mT, bias_O


def input_dtype(linear: nn.Module) -> torch.dtype:
    """In which dtype a linear map takes its input; packed weights of few bits have none of their own."""
    found = (p.dtype for p in linear.parameters() if p.is_floating_point())
    return next(found, torch.get_default_dtype())
