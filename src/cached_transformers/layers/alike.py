"""Which modules differ in nothing but their weights, so that several can be run as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

HELD = ("_parameters", "_buffers", "_modules")
"""What a module holds: shapes of it are compared. Whatever else it has must be equal; of hooks no two are, but those on
its state dict are no part of what it computes."""


def groups_of(modules: Sequence[nn.Module]) -> list[list[int]]:
    """Places of the modules that are alike, each kind for itself, all ascending."""
    groups: list[list[int]] = []
    for place, module in enumerate(modules):
        fitting = (group for group in groups if difference(modules[group[0]], module) is None)
        group = next(fitting, None)
        if group is None:
            groups.append([place])
        else:
            group.append(place)
    return groups


def difference(first: nn.Module, second: nn.Module) -> str | None:
    """Where two modules differ in more than the values of their weights: a name; None if they are alike.

    A module that counts what it does (`tallies`) is like no other.
    """
    modules, others = dict(first.named_modules()), dict(second.named_modules())
    for name in {**modules, **others}:
        mine, other = modules.get(name), others.get(name)
        if type(mine) is not type(other) or hasattr(mine, "tallies"):
            return name
        for key in {**vars(mine), **vars(other)}:
            if "_state_dict" in key:
                continue
            a, b = vars(mine).get(key), vars(other).get(key)
            if not (_shapes(a) == _shapes(b) if key in HELD else _equal(a, b)):
                return f"{name}.{key}" if name else key
    return None


def _shapes(held: Any) -> dict[str, Any]:
    return {
        name: (value.shape, value.dtype, value.device) if isinstance(value, Tensor) else value is None
        for name, value in held.items()
    }


def _equal(first: Any, second: Any) -> bool:
    """Whether two settings are equal; tensors among them by their values."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(_equal(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_equal, first, second))
    return (first == second) is True  # arrays answer with arrays
