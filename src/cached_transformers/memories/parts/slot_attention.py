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
        """Read of the valid slots (all when None); zeros for a row without any."""
        return self.read(x_BND, *self.open(slots_BMD, valid_BM))

    def _heads(self, t_BND: Tensor) -> Tensor:
        return t_BND.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def open(self, slots_BMD: Tensor, valid_BM: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values (B, H, M, E) of the slots, and which are valid."""
        if valid_BM is not None:
            slots_BMD = torch.where(valid_BM[..., None], slots_BMD, 0)  # a NaN would survive a mask on the logits
        k, v = self.key_value(slots_BMD).chunk(2, -1)
        return self._heads(k), self._heads(v), valid_BM

    def read(self, x_BND: Tensor, k_BHME: Tensor, v_BHME: Tensor, valid_BM: Tensor | None) -> Tensor:
        """`forward`, of what `open` gave."""
        mask = None if valid_BM is None else valid_BM[:, None, None]
        q_BHNE = self._heads(self.query(self.norm(x_BND)))
        out = F.scaled_dot_product_attention(q_BHNE, k_BHME, v_BHME, attn_mask=mask)
        y_BND = self.output(out.transpose(1, 2).flatten(2))
        return y_BND if valid_BM is None else torch.where(valid_BM.any(1)[:, None, None], y_BND, 0)
