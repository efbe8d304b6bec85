"""Concatenation of several contexts, for a core that attends all of them.

Legend: B rows, N tokens, M slots, H heads, E head width, P position channels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .memory import Context


def join(first: Context | None, second: Context | None) -> Context | None:
    """Concatenate both contexts; a context of one row serves all rows.

    Raises:
        ValueError: both have values wider than a head, so that neither can gather the result.
    """
    if first is None or second is None:
        return first if second is None else second
    if first.gather is not None and second.gather is not None:
        raise ValueError("two memories of one layer have values wider than a head; take one of them")
    rows, width = (max(a, b) for a, b in zip(*(c.v_BHME.shape[::3] for c in (first, second)), strict=True))
    k_BHME, v_BHME, positions_BMP, valid_BM = (
        torch.cat([t.expand(rows, *t.shape[1:]) for t in pair], dim)
        for pair, dim in (
            ((first.k_BHME, second.k_BHME), 2),
            ([widened(c.v_BHME, width) for c in (first, second)], 2),
            ((first.positions_BMP, second.positions_BMP), 1),
            ((first.valid_BM, second.valid_BM), 1),
        )
    )
    visible = None
    if first.visible_BHNM is not None or second.visible_BHNM is not None:
        visible = torch.cat(_same_masks(first, second), -1)
    bias = None
    if first.bias_BHM is not None or second.bias_BHM is not None:
        biases = (c.k_BHME.new_zeros(c.k_BHME.shape[:3]) if c.bias_BHM is None else c.bias_BHM for c in (first, second))
        bias = torch.cat([t.expand(rows, -1, -1) for t in biases], -1)
    gather, clean = first.gather or second.gather, first.clean and second.clean
    return Context(
        k_BHME, v_BHME, positions_BMP, valid_BM, visible_BHNM=visible, gather=gather, clean=clean, bias_BHM=bias
    )


def widened(v_BHNE: Tensor, width: int) -> Tensor:
    """Pad values at the front to `width` channels; the same tensor if it has them."""
    return v_BHNE if v_BHNE.shape[-1] == width else F.pad(v_BHNE, (width - v_BHNE.shape[-1], 0))


def logits_of(visible_BHNM: Tensor) -> Tensor:
    """Logarithm of the visible shares (see `Context`), to add to the logits.

    Minus infinity without a gradient for hidden slots, where the logarithm's own gradient is not finite.
    """
    if visible_BHNM.dtype == torch.bool:
        visible_BHNM = visible_BHNM.float()
    seen_BHNM = visible_BHNM > 0
    return torch.where(seen_BHNM, visible_BHNM, 1).log().masked_fill(~seen_BHNM, -torch.inf)


def _same_masks(first: Context, second: Context) -> list[Tensor]:
    """Visibility masks of two contexts for the same rows and tokens; at least one context has a mask."""
    masks = [c.visible_BHNM for c in (first, second)]
    said = [m for m in masks if m is not None]
    rows, tokens = (max(m.shape[dim] for m in said) for dim in (0, 2))
    dtype = [*(m.dtype for m in said if m.dtype != torch.bool), torch.bool][0]
    return [
        (c.valid_BM.new_ones(1, 1, 1, c.k_BHME.shape[2]) if m is None else m).to(dtype).expand(rows, 1, tokens, -1)
        for m, c in zip(masks, (first, second), strict=True)
    ]
