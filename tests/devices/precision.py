"""How near a result on a device must be to that of the same weights and inputs in float64 on the CPU.

The one place for tolerances. The measure is the error's root mean square over that of the result, so that single
numbers near 0 do not count more than they weigh.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

VALUES = {torch.float32: 1e-4, torch.bfloat16: 0.08}
"""Of outputs and states: models of two layers come to some 1e-6 in float32, and to 0.01 to 0.04 in bfloat16."""
GRADIENTS = {torch.float32: 1e-3, torch.bfloat16: 0.25}
AUTOCAST = 0.08
"""Of outputs under autocast to bfloat16, whose weights stay float32."""
COMPILED = 1e-4
"""Of compiled code beside eager code, both in float32."""

dtypes = pytest.mark.parametrize("dtype", list(VALUES), ids=lambda dtype: str(dtype).removeprefix("torch."))


def rounded(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model in float64 with weights that the dtype has."""
    return copy.deepcopy(model).to(dtype).double()


def placed(value: Any, device: str, dtype: torch.dtype) -> Any:
    """Tensors of a nest on the device, those of floats in the dtype; what was one tensor stays one."""
    moved: dict[int, Tensor] = {}

    def move(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        return moved.setdefault(id(part), part.to(device, dtype if part.is_floating_point() else part.dtype))

    return tree_map(move, value)


def error(got: Tensor, want: Tensor) -> float:
    """Root mean square of the difference over that of what is wanted."""
    got, want = (t.detach().double().cpu() for t in (got, want))
    assert got.shape == want.shape and got.isfinite().all()
    return float((got - want).norm() / want.norm().clamp(min=1e-6 * max(1, want.numel()) ** 0.5))


def near(got: Tensor, want: Tensor, tolerance: float, what: str = "") -> None:
    """Hold a result to a tolerance."""
    found = error(got, want)
    assert found <= tolerance, f"{what}: error of {found:.2e}, above {tolerance}"


def gradients_near(got: Iterable[Tensor | None], want: Iterable[Tensor | None], tolerance: float) -> None:
    """Hold all gradients together to a tolerance, and each to being there where it is wanted."""
    pairs = [(a, b) for a, b in zip(got, want, strict=True) if b is not None and bool((b != 0).any())]
    assert pairs and all(a is not None for a, _ in pairs)
    ours, theirs = (torch.cat([t.detach().double().cpu().flatten() for t in side]) for side in zip(*pairs, strict=True))
    near(ours, theirs, tolerance, "gradients")
