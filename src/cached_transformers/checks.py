"""Conditions on sizes, and on the values in a tensor, which may lie on a device or in a compiled graph."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

LARGEST_SIZE = 2**31 - 1
"""Above it a tensor of one row has more than 8 GB."""


def at_least_one(way_out: str = "", **sizes: int | None) -> None:
    """Refuse (ValueError) a size below 1, or beyond all use; None is a size that was not given."""
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name}={size} must be at least 1{way_out}")
        if size is not None and size > LARGEST_SIZE:
            raise ValueError(f"{name}={size} must be at most {LARGEST_SIZE}")


def comparing_lengths(**exponents: float) -> None:
    """Refuse (ValueError) an exponent of lengths whose powers leave the range of numbers."""
    for name, exponent in exponents.items():
        if not -50 <= exponent <= 50:
            raise ValueError(f"{name}={exponent} must lie in -50..50; 1 divides sums by the length, 0 does not")


def shares(**rates: float | None) -> None:
    """Refuse (ValueError) a share outside of [0, 1], as of what is dropped; None is one that was not given."""
    for name, rate in rates.items():
        if rate is not None and not 0 <= rate <= 1:
            raise ValueError(f"{name}={rate} must lie in [0, 1]: it is a share")


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
