"""Read padding and maps from the masks and sizes of host models.

Legend: B rows, N tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cached_transformers.checks import insist


def map_size(tokens: int, prefix: int, grid: tuple[int, int]) -> tuple[int, int] | None:
    """(height, width) of the map after `prefix` class tokens: `grid` when it fits, else a square, else None."""
    cells = tokens - prefix
    if cells == grid[0] * grid[1]:
        return grid
    side = round(cells**0.5)
    return (side, side) if side * side == cells else None


MASKED = (
    "attention was called with a mask (or is_causal=True), which a shared cache would bypass; a causal mask would so "
    "leak the future. Mark padding by a padding mask; causal models need the memory 'grc_stream'"
)


def no_mask(mask: Tensor | None, is_causal: bool = False) -> None:
    """Refuse (ValueError) a mask or causal flag: a shared cache shows every token the whole segment, past any mask."""
    if mask is not None or is_causal:
        raise ValueError(MASKED)


PER_QUERY = "the attention mask differs between queries, {}; pass a mask of only padding, (rows, tokens)"
"""Message for a mask that is not one of padding, with the reason."""
SEES_ALL = (
    "but a shared cache shows every token the whole segment, past any mask (a causal mask would so leak the future)"
)


def padding_of(mask: Tensor | None, tokens: int, why: str = SEES_ALL) -> Tensor | None:
    """Padding (B, N), True = padding, from a mask over keys: (B, N) with 1 = keep, or (B, 1, 1 or N, N) bool or
    additive. `why`: the reason for refusing a mask that differs between queries.

    Raises:
        ValueError: the mask has another shape, or hides from one query what it shows another (a causal mask).
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise ValueError(
            f"an attention mask of type {type(mask).__name__} (flex attention) does not tell the padding; call "
            "model.set_attn_implementation('sdpa') or 'eager' first"
        )
    if mask.dim() == 4 and mask.shape[1] == 1 and mask.shape[-1] == tokens:
        insist((mask == mask[:, :, :1]).all(), PER_QUERY.format(why))
        mask = mask[:, 0, 0]
        return ~mask if mask.dtype == torch.bool else mask < 0
    if mask.dim() == 2 and mask.shape[-1] == tokens:
        return mask == 0
    raise ValueError(f"cannot read padding from an attention mask of shape {tuple(mask.shape)} over {tokens} tokens")


def padding_behind_window(mask: Tensor | None, tokens: int) -> Tensor | None:
    """Padding (B, N) from a mask (B, 1, N, N) of a layer that is not causal and may have a window: the keys that no
    query sees.

    Raises:
        ValueError: the mask has another shape.
    """
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[-2] != tokens:
        return padding_of(mask, tokens)
    visible = mask if mask.dtype == torch.bool else mask >= 0
    return padding_of(visible.any(-2, keepdim=True), tokens)
