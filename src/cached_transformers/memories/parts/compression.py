"""Functions that compress a group of hidden states into one slot (Rae et al. 2019, arXiv:1911.05507, section 3.2).

Legend: B rows, G groups of C = rate hidden states, D model width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PooledGroup(nn.Module):
    """Mean or maximum of each group."""

    def __init__(self, reduce: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.reduce = reduce

    def forward(self, groups_BGCD: Tensor) -> Tensor:
        return self.reduce(groups_BGCD, 2)


class Convolved(nn.Module):
    """Convolution whose kernel and stride are the rate: one linear map of each group, C D^2 multiply-adds a slot."""

    def __init__(self, rate: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(rate * width, width)

    def forward(self, groups_BGCD: Tensor) -> Tensor:
        return self.linear(groups_BGCD.flatten(2))


class Dilated(nn.Module):
    """Convolutions of two taps whose dilations grow, until one place sees the whole group.

    The paper does not say how its dilated convolutions are laid out; this is the smallest stack that needs no padding.
    Dilations are 1, 2, 4, ... and a rest, which add up to C - 1, so that each place of the group is reached.
    """

    def __init__(self, rate: int, width: int) -> None:
        super().__init__()
        dilations: list[int] = []
        left = rate - 1
        while left:
            dilations.append(min(2 ** len(dilations), left))
            left -= dilations[-1]
        self.convolutions = nn.ModuleList(nn.Conv1d(width, width, 2, dilation=d) for d in dilations)

    def forward(self, groups_BGCD: Tensor) -> Tensor:
        h = groups_BGCD.flatten(0, 1).mT
        for index, convolution in enumerate(self.convolutions):
            h = convolution(h if index == 0 else F.gelu(h))
        return h[..., 0].unflatten(0, groups_BGCD.shape[:2])


FUNCTIONS: dict[str, Callable[[int, int], nn.Module] | None] = {
    "mean": lambda rate, width: PooledGroup(torch.mean),
    "max": lambda rate, width: PooledGroup(torch.amax),
    "conv": Convolved,
    "dilated": Dilated,
    "most_used": None,
}
"""By name, made from the rate and the width; None where states are chosen, not computed."""
LEARNED = ("conv", "dilated")
"""Those that have parameters."""
