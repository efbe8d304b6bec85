"""Layers of the Pyramid Vision Transformer (`pyramid.py`): spatial-reduction attention, block, patches, positions.

Paper: arXiv:2102.12122. Original implementation: whai362/PVT, classification/pvt.py, whose parameter names these are.

Legend: B rows, N tokens, R reduced tokens, D model width, C channels, H height, W width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.layers.feed_forward import DropPath
from cached_transformers.layers.reduction import to_map

Size = tuple[int, int]


class SpatialReductionAttention(nn.Module):
    """Self-attention with keys and values from a map reduced by a strided convolution (equations 1-3).

    Args:
        dim: D. num_heads: heads. sr_ratio: kernel and stride of the convolution; 1 for none.
        size: (height, width) of the token map that the model was built for; prefix: class tokens before it. A memory
            of this layer reads both.

    Cost in multiply-adds per row: 2 N D^2 + 2 R D^2 + 2 N R D, and N D^2 for the convolution.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        sr_ratio: int = 1,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        size: Size = (1, 1),
        prefix: int = 0,
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise ValueError(f"width {dim} must be a positive multiple of num_heads={num_heads}")
        if prefix and sr_ratio > 1:
            raise ValueError(f"sr_ratio={sr_ratio} reduces a map without class tokens; take sr_ratio=1")
        self.dim, self.num_heads, self.size, self.prefix = dim, num_heads, size, prefix
        self.q = nn.Linear(dim, dim, bias=qkv_bias)
        self.kv = nn.Linear(dim, 2 * dim, bias=qkv_bias)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)
        self.sr = nn.Conv2d(dim, dim, sr_ratio, sr_ratio) if sr_ratio > 1 else None
        self.norm = nn.LayerNorm(dim) if sr_ratio > 1 else None

    def forward(self, x_BND: Tensor, size: Size) -> Tensor:
        """(B, N, D). `size` is the (height, width) of the map after the class tokens."""
        source_BRD = x_BND
        if self.sr is not None and self.norm is not None:
            source_BRD = self.norm(self.sr(to_map(x_BND, size)).flatten(2).transpose(1, 2))
        q = self.q(x_BND).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = self.kv(source_BRD).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0)
        return self.proj_drop(self.proj(y.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """Linear, GELU, linear; 2 N D F multiply-adds for F hidden units."""

    def __init__(self, dim: int, hidden: int, drop: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x_BND: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x_BND)))))  # type: ignore[no-any-return]


class PyramidBlock(nn.Module):
    """Pre-norm attention and feed-forward with residual connections."""

    def __init__(
        self, dim: int, num_heads: int, mlp_ratio: float, *, norm_eps: float, drop_path: float, **attention: Any
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, norm_eps)
        self.attn = SpatialReductionAttention(dim, num_heads, **attention)
        self.drop_path = DropPath(drop_path)
        self.norm2 = nn.LayerNorm(dim, norm_eps)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), attention.get("proj_drop", 0.0))

    def forward(self, x_BND: Tensor, size: Size) -> Tensor:
        x_BND = x_BND + self.drop_path(self.attn(self.norm1(x_BND), size))
        return x_BND + self.drop_path(self.mlp(self.norm2(x_BND)))  # type: ignore[no-any-return]


class PatchEmbedding(nn.Module):
    """Patches as tokens: convolution and norm; `size` is the map it was built for."""

    def __init__(self, channels: int, dim: int, patch_size: int, size: Size) -> None:
        super().__init__()
        self.size = size
        self.proj = nn.Conv2d(channels, dim, patch_size, patch_size)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x_BCHW: Tensor) -> tuple[Tensor, Size]:
        """Tokens (B, N, D), and the (height, width) of their map."""
        x_BDHW = self.proj(x_BCHW)
        size = (int(x_BDHW.shape[2]), int(x_BDHW.shape[3]))
        return self.norm(x_BDHW.flatten(2).transpose(1, 2)), size


def resize_positions(positions_1ND: Tensor, size: Size, to_size: Size, prefix: int = 0) -> Tensor:
    """Interpolate positions (1, N, D) of a map, after `prefix` class tokens, bilinearly to another map."""
    if size == to_size:
        return positions_1ND
    image = to_map(positions_1ND[:, prefix:], size)
    # Half precision lacks a bilinear kernel on some devices.
    resized = F.interpolate(image.float() if image.dtype != torch.float64 else image, to_size, mode="bilinear")
    cells_1ND = resized.flatten(2).transpose(1, 2).to(positions_1ND.dtype)
    return torch.cat([positions_1ND[:, :prefix], cells_1ND], 1) if prefix else cells_1ND
