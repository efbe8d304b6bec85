"""The slots of a bounded cache that stay: those with the best scores, in the order of time.

Legend: X any dimensions (rows, or rows and heads), M slots, L = M + N slots and new tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


def best(score_XL: Tensor, valid_XL: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Which of all stay, (X, M), oldest first, and whether they are real; those that are not stand in front."""
    total = score_XL.shape[-1]
    chosen_XM = score_XL.masked_fill(~valid_XL, -torch.inf).topk(slots, -1).indices
    real_XM = valid_XL.gather(-1, chosen_XM)
    order_XM = torch.where(real_XM, chosen_XM, chosen_XM - total).sort(-1).values
    return order_XM % total, order_XM >= 0


def from_last(valid_XL: Tensor) -> Tensor:
    """How many real ones stand behind each, itself included."""
    return valid_XL.flip(-1).cumsum(-1).flip(-1)
