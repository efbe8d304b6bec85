"""Position encodings. All take explicit positions, so that keys of a memory can be placed where they were seen.

A scheme may act in three places, each with an identity default: `embed` adds to the tokens at the model's entrance,
`rotate` turns queries and keys, `bias` adds to the attention logits.

Legend: B rows, N queries, M keys, H heads, E head width, D model width, P position channels (1, or row and column).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn


class Positions(nn.Module):
    """No position information; base of all schemes."""

    def embed(self, positions_BNP: Tensor) -> Tensor | None:
        """(B, N, D) to add to the tokens, or None."""
        return None

    def rotate(self, t_BHNE: Tensor, positions_BNP: Tensor) -> Tensor:
        """Queries or keys with their positions applied."""
        return t_BHNE

    def bias(self, q_positions_BNP: Tensor, k_positions_BMP: Tensor) -> Tensor | None:
        """(B, H, N, M) to add to the logits, or None."""
        return None


class LearnedPositions(Positions):
    """A trained vector for each of `length` positions.

    `embed` expects positions below `length`; the models check the segment's length and refuse a longer one.
    """

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.length = length
        self.weight = nn.Parameter(torch.empty(length, width))
        nn.init.trunc_normal_(self.weight, std=width**-0.5)  # as large as the tokens, so that narrow models see it too

    def embed(self, positions_BNP: Tensor) -> Tensor:
        return self.weight[positions_BNP[..., 0]]


class SinusoidalPositions(Positions):
    """Fixed interleaved sines and cosines (arXiv:1706.03762, section 3.5); defined for every position."""

    def __init__(self, width: int, base: float = 10000.0) -> None:
        super().__init__()
        if width % 2:
            raise ValueError(f"sinusoidal positions need an even width, got width={width}")
        self.width, self.base = width, base

    def embed(self, positions_BNP: Tensor) -> Tensor:
        angle = angles(positions_BNP, self.width, self.base)
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2)


class RotaryPositions(Positions):
    """Rotation of pairs of channels by an angle proportional to the position (RoFormer, arXiv:2104.09864, eq. 34)."""

    def __init__(self, head_width: int, base: float = 10000.0) -> None:
        super().__init__()
        if head_width % 2:
            raise ValueError(f"rotary positions need an even head width, got {head_width}")
        self.head_width, self.base = head_width, base

    def rotate(self, t_BHNE: Tensor, positions_BNP: Tensor) -> Tensor:
        angle = angles(positions_BNP, self.head_width, self.base)[:, None]
        cos, sin = angle.cos().to(t_BHNE.dtype), angle.sin().to(t_BHNE.dtype)
        even, odd = t_BHNE[..., 0::2], t_BHNE[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


class ALiBiPositions(Positions):
    """Logits fall linearly with distance, at a rate of its own per head (ALiBi, arXiv:2108.12409, section 3)."""

    slopes: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        power = 2 ** math.floor(math.log2(heads))
        first = [2 ** (-8 * (i + 1) / power) for i in range(power)]
        between = [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
        self.register_buffer("slopes", torch.tensor(first + between), persistent=False)

    def bias(self, q_positions_BNP: Tensor, k_positions_BMP: Tensor) -> Tensor:
        distance = (q_positions_BNP[:, :, None, 0] - k_positions_BMP[:, None, :, 0]).abs()
        return -self.slopes[:, None, None] * distance[:, None]


class RelativePositionBias2D(Positions):
    """A trained logit per head and per (row, column) offset inside a window (Swin, arXiv:2103.14030, eq. 4).

    The table's row for the offset (dy, dx), query minus key, is (dy + height - 1) * (2 * width - 1) + dx + width - 1.
    """

    def __init__(self, window: tuple[int, int], heads: int) -> None:
        super().__init__()
        self.window = window
        self.table = nn.Parameter(torch.empty((2 * window[0] - 1) * (2 * window[1] - 1), heads))
        nn.init.trunc_normal_(self.table, std=0.02)

    def bias(self, q_positions_BNP: Tensor, k_positions_BMP: Tensor) -> Tensor:
        offset = q_positions_BNP[:, :, None] - k_positions_BMP[:, None, :]
        height, width = self.window
        row = (offset[..., 0] + height - 1) * (2 * width - 1) + offset[..., 1] + width - 1
        return self.table[row].permute(0, 3, 1, 2)


def angles(positions_BNP: Tensor, width: int, base: float) -> Tensor:
    """(B, N, width / 2): position times base^(-2 i / width), float32 whatever the model's dtype.

    Not a buffer, which `model.bfloat16()` would convert: bfloat16 has no odd number above 256.
    """
    exponent = torch.arange(0, width, 2, device=positions_BNP.device) / width
    return positions_BNP[..., :1].float() * base**-exponent


def grid_positions(size: tuple[int, int], device: torch.device | str | None = None) -> Tensor:
    """(1, height * width, 2): row and column of each cell, in raster order."""
    rows = torch.arange(size[0], device=device).repeat_interleave(size[1])
    columns = torch.arange(size[1], device=device).repeat(size[0])
    return torch.stack([rows, columns], -1)[None]


def make_positions(name: str, *, width: int, heads: int, length: int | None = None) -> Positions:
    """Build a scheme by name: "none", "learned", "sinusoidal", "rotary" or "alibi".

    Raises:
        ValueError: the name is unknown, or "learned" is asked for without a `length`.
    """
    if name == "learned" and length is None:
        raise ValueError("learned positions need a length: the longest segment; or take 'sinusoidal' or 'rotary'")
    makers: dict[str, Callable[[], Positions]] = {
        "none": Positions,
        "learned": lambda: LearnedPositions(length or 0, width),
        "sinusoidal": lambda: SinusoidalPositions(width),
        "rotary": lambda: RotaryPositions(width // heads),
        "alibi": lambda: ALiBiPositions(heads),
    }
    if name not in makers:
        raise ValueError(f"unknown positions {name!r} (known: {', '.join(makers)})")
    return makers[name]()
