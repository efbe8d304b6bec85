"""Spatial reduction of keys and values in pyramid transformers (PVT, arXiv:2102.12122, eq. 3; PVTv2, arXiv:2106.13797).

Legend: B rows, N tokens, R reduced tokens, D width.
"""

from __future__ import annotations

from torch import Tensor, nn


class SpatialReduction(nn.Module):
    """Strided convolution of the token map, then LayerNorm: N tokens become N / ratio^2.

    Args:
        width: D. ratio: kernel and stride of the convolution. eps: of the LayerNorm.

    Cost: N D^2 multiply-adds per row.
    """

    def __init__(self, width: int, ratio: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(width, width, ratio, ratio)
        self.norm = nn.LayerNorm(width, eps)

    def forward(self, x_BND: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        """(B, R, D). `size` is the (height, width) of the map."""
        return self.norm(self.convolution(to_map(x_BND, size)).flatten(2).transpose(1, 2))


class PooledReduction(nn.Module):
    """Adaptive pooling to a fixed map, 1 x 1 convolution, LayerNorm, GELU: the linear form of PVTv2.

    Args:
        width: D. side: of the pooled map.
    """

    def __init__(self, width: int, side: int = 7) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(side)
        self.convolution = nn.Conv2d(width, width, 1)
        self.norm = nn.LayerNorm(width)
        self.activation = nn.GELU()

    def forward(self, x_BND: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        """(B, side^2, D). `size` is the (height, width) of the map."""
        pooled = self.convolution(self.pool(to_map(x_BND, size)))
        return self.activation(self.norm(pooled.flatten(2).transpose(1, 2)))


def to_map(x_BND: Tensor, size: tuple[int, int] | None) -> Tensor:
    """(B, D, height, width) of tokens in raster order.

    Raises:
        ValueError: no size is given, or it does not hold the tokens.
    """
    if size is None or size[0] * size[1] != x_BND.shape[1]:
        raise ValueError(f"{x_BND.shape[1]} tokens need the size (height, width) of their map, got size={size}")
    # Compiled code needs contiguous strides for the convolution's gradient.
    return x_BND.transpose(1, 2).unflatten(2, size).contiguous()
