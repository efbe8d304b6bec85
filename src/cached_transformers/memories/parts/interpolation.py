"""Interpolation of tokens to slots ("interp" in Algorithm 1 of arXiv:2312.12742, which leaves the mode open).

nearest: slot i takes token floor(i L / M) of the row's L valid tokens (as in the released code).
linear:  half-pixel centres, (i + 1/2) L / M - 1/2, edges clamped.
area:    the mean over tokens floor(i L / M) up to ceil((i + 1) L / M), as adaptive average pooling; every token counts.

Legend: B rows, N tokens, M slots, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.checks import at_least_one

from .fifo_store import taken

Interpolation = Literal["nearest", "linear", "area"]


def interpolate(
    x_BNC: Tensor,
    length: int,
    mode: Interpolation = "nearest",
    padding_BN: Tensor | None = None,
    *,
    size: tuple[int, int] | None = None,
    to_size: tuple[int, int] | None = None,
    prefix: int = 0,
) -> Tensor:
    """Interpolate tokens to slots, (B, N, C) -> (B, length, C).

    Args:
        padding_BN: True = padding; each row then spreads its own valid tokens over all slots. A row without any gives
            zeros.
        size, to_size: maps of tokens and slots for two-dimensional interpolation; the `prefix` first tokens pass
            unchanged.
    """
    if padding_BN is not None:
        if to_size is not None:
            raise ValueError("two-dimensional interpolation takes no padding mask; build the cache without a map size")
        return _interpolate_valid(x_BNC, length, mode, padding_BN)
    if size is not None and to_size is not None and size != to_size:
        if size[0] * size[1] + prefix != x_BNC.shape[1]:
            raise ValueError(
                f"{x_BNC.shape[1]} tokens are not a map of {size[0]} x {size[1]} after {prefix} class token(s)"
            )
        image = x_BNC[:, prefix:].transpose(1, 2).unflatten(2, size)
        resized = _resize_2d(image, to_size, mode).flatten(2).transpose(1, 2)
        return torch.cat([x_BNC[:, :prefix], resized], 1) if prefix else resized
    n = x_BNC.shape[1]
    if n == length:
        return x_BNC
    if mode == "nearest":
        return x_BNC[:, torch.arange(length, device=x_BNC.device) * n // length]
    x_BCN = x_BNC.transpose(1, 2)
    if mode == "linear":
        return F.interpolate(x_BCN, size=length, mode="linear", align_corners=False).transpose(1, 2)
    return F.adaptive_avg_pool1d(x_BCN, length).transpose(1, 2)


def nearest_map(x_BNC: Tensor, length: int, padding_BN: Tensor | None = None) -> Tensor:
    """(B, length, N): the matrix of `interpolate` with "nearest", with one 1 per slot."""
    rows, n = x_BNC.shape[:2]
    place_N, slot_M = (torch.arange(size, device=x_BNC.device) for size in (n, length))
    if padding_BN is None:
        token_BM, some_B = (slot_M * n // length).expand(rows, -1), None
    else:
        order_BN = torch.argsort(padding_BN.to(torch.uint8), dim=1, stable=True)
        count_B1 = (~padding_BN).sum(1, keepdim=True)
        token_BM, some_B = order_BN.gather(1, slot_M * count_B1 // length), count_B1[..., None] > 0
    one_BMN = token_BM[..., None] == place_N
    return (one_BMN if some_B is None else one_BMN & some_B).to(x_BNC.dtype)


def _resize_2d(image_BCHW: Tensor, size: tuple[int, int], mode: Interpolation) -> Tensor:
    if mode == "linear":
        return F.interpolate(image_BCHW, size=size, mode="bilinear", align_corners=False)
    if mode == "area":
        return F.adaptive_avg_pool2d(image_BCHW, size)
    height, width = image_BCHW.shape[2:]
    rows = torch.arange(size[0], device=image_BCHW.device) * height // size[0]
    columns = torch.arange(size[1], device=image_BCHW.device) * width // size[1]
    return image_BCHW[:, :, rows[:, None], columns]


def _interpolate_valid(x_BNC: Tensor, length: int, mode: Interpolation, padding_BN: Tensor) -> Tensor:
    """Interpolate each row over its own valid tokens, at any places of the row."""
    order_BN = torch.argsort(padding_BN.to(torch.uint8), dim=1, stable=True)  # valid tokens first, in their order
    count_B1 = (~padding_BN).sum(1, keepdim=True)
    slot_M = torch.arange(length, device=x_BNC.device)

    def take(index_BM: Tensor) -> Tensor:
        return taken(x_BNC, order_BN.gather(1, index_BM))

    # Half precision can neither count a long row's places nor sum its tokens.
    wide = torch.promote_types(x_BNC.dtype, torch.float32)
    last_B1 = (count_B1 - 1).clamp(min=0)
    if mode == "nearest":
        out = take(slot_M * count_B1 // length)
    elif mode == "linear":
        place_BM = (slot_M.to(wide) + 0.5) * (count_B1.to(wide) / length) - 0.5
        place_BM = torch.minimum(place_BM.clamp(min=0), last_B1.to(wide))
        low_BM = place_BM.long()
        high_BM = torch.minimum(low_BM + 1, last_B1)
        out = torch.lerp(take(low_BM), take(high_BM), (place_BM - low_BM)[..., None].to(x_BNC.dtype))
    else:
        first_BM = slot_M * count_B1 // length
        end_BM = -(-(slot_M + 1) * count_B1 // length)
        sorted_BNC = taken(x_BNC, order_BN).to(wide)
        total_BNC = F.pad(sorted_BNC.masked_fill(padding_BN.gather(1, order_BN)[..., None], 0).cumsum(1), (0, 0, 1, 0))
        out = (taken(total_BNC, end_BM) - taken(total_BNC, first_BM)) / (end_BM - first_BM).clamp(min=1)[..., None]
    return out.to(x_BNC.dtype).masked_fill(count_B1[..., None] == 0, 0)


def check_size(length: int, size: Sequence[int] | None, prefix: int) -> None:
    """Refuse (ValueError) a length below 1, or other than the size of the map and its class tokens."""
    at_least_one(" slot", length=length)
    if size is not None and size[0] * size[1] + prefix != length:
        raise ValueError(f"cache length={length} must equal size {size[0]} x {size[1]} + prefix {prefix}")


def coarser_map(
    length: int, size: Sequence[int] | None, prefix: int, stride: int
) -> tuple[int, tuple[int, int] | None]:
    """Number of slots and (height, width) of their map, one slot per stride x stride tokens and one per class token."""
    at_least_one("; 1 is a slot for every token", stride=stride)
    if size is None:
        if stride > 1:
            raise ValueError(
                f"stride={stride} needs tokens on a map; give its size=(height, width), or take fewer slots by length"
            )
        return length, None
    check_size(length, size, prefix)
    height, width = (-(-int(side) // stride) for side in size)
    return height * width + prefix, (height, width)


def coarser_reduction(ratio: int, stride: int) -> int:
    """Return the spatial reduction left for the keys and values of a cache that a `stride` made coarser."""
    return max(ratio // max(stride, 1), 1)
