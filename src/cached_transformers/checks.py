"""Conditions on the values in a tensor, which may lie on a device or in a compiled graph."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def insist(condition: Tensor, why: str) -> None:
    """Require a condition on values: a `ValueError` on the CPU; in a graph or on a device, an error of torch's later.

    A tensor that has a shape and no values, on which operations are counted, is not asked.

    Args:
        condition: one bool. why: the message.
    """
    if isinstance(condition, FakeTensor) and not torch.compiler.is_compiling():
        return
    later = getattr(torch, "_assert_async", None)  # private, so perhaps not there in another torch
    if later is not None and (torch.compiler.is_compiling() or not condition.is_cpu):
        later(condition, why)  # asking now would break the graph, or wait for the device
    elif not condition:
        raise ValueError(why)
