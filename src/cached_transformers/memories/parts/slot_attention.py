"""Cross-attention of the tokens over the slots of a model memory.

Legend: B rows, N tokens, M slots, D model width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class SlotAttention(nn.Module):
    """Residual cross-attention of the tokens over the slots of a model memory ("sublayer" insertion)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x_BND: Tensor, slots_BMD: Tensor, valid_BM: Tensor | None = None) -> Tensor:
        """What the tokens read from the valid slots (all when None); zeros for a row that has none."""
        mask = None
        if valid_BM is not None:
            slots_BMD = torch.where(valid_BM[..., None], slots_BMD, 0)  # a NaN would survive a mask on the logits
            mask = valid_BM[:, None, None]
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in (self.query(self.norm(x_BND)), *self.key_value(slots_BMD).chunk(2, -1))
        )
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y_BND = self.output(out.transpose(1, 2).flatten(2))
        return y_BND if valid_BM is None else torch.where(valid_BM.any(1)[:, None, None], y_BND, 0)
