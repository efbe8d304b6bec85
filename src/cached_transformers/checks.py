"""Checks of sizes, and of tensor values on a device or in a compiled graph."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from cached_transformers.annotations import python_number

LARGEST_SIZE = 2**31 - 1
"""Larger sizes mean tensors of more than 8 GB per row."""


def at_least_one(way_out: str = "", *, least: int = 1, **sizes: int | None) -> None:
    """Refuse (ValueError) sizes that are no whole numbers, below `least` or above `LARGEST_SIZE`; None is not given."""
    for name, size in sizes.items():
        if size is None:
            continue
        size = python_number(size)
        if isinstance(size, bool) or not isinstance(size, int):
            raise ValueError(f"{name}={size!r} must be a whole number, at least {least}{way_out}")
        if not least <= size <= LARGEST_SIZE:
            rule = f"at least {least}{way_out}" if size < least else f"at most {LARGEST_SIZE}"
            raise ValueError(f"{name}={size} must be {rule}")


def comparing_lengths(**exponents: float) -> None:
    """Refuse (ValueError) exponents of lengths whose powers overflow."""
    for name, exponent in exponents.items():
        if not -50 <= exponent <= 50:
            raise ValueError(f"{name}={exponent} must lie in -50..50; 1 divides sums by the length, 0 does not")


def shares(**rates: float | None) -> None:
    """Refuse (ValueError) shares outside of [0, 1], such as dropout; None is a share that was not given."""
    for name, rate in rates.items():
        if rate is not None and not 0 <= rate <= 1:
            raise ValueError(f"{name}={rate} must lie in [0, 1]: it is a share")


def none_true(t: Tensor) -> bool:
    """Return True if no value is true; False also where asking would synchronise, or break a graph or `torch.vmap`."""
    return known(t) and not bool(t.any())


def known(t: Tensor) -> bool:
    """Return True if reading a value neither synchronises nor breaks a graph or `torch.vmap`."""
    without = torch.compiler.is_compiling() or isinstance(t, FakeTensor) or torch._C._functorch.is_batchedtensor(t)
    return t.is_cpu and not without


def insist(condition: Tensor, why: str) -> None:
    """Require a condition on values: `ValueError` on the CPU, torch's asynchronous assertion in graphs and on devices.

    Tensors without values (`FakeTensor`) are not checked.

    Args:
        condition: one bool. why: the message.
    """
    if isinstance(condition, FakeTensor) and not torch.compiler.is_compiling():
        return
    later = getattr(torch, "_assert_async", None)  # private, so other versions of torch may lack it
    if later is not None and (torch.compiler.is_compiling() or not condition.is_cpu):
        later(condition, why)  # a check now would break the graph, or synchronise
    elif not condition:
        raise ValueError(why)
