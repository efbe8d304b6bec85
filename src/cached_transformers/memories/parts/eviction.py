"""The slots of a bounded cache that stay: those with the best scores, in the order of time.

Legend: X any dimensions (rows, or rows and heads), M slots, N new tokens, L = M + N, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor


def best(score_XL: Tensor, valid_XL: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """Indices of the kept entries, (X, M), oldest first, and whether they are real; empty ones come first."""
    total = score_XL.shape[-1]
    chosen_XM = score_XL.masked_fill(~valid_XL, -torch.inf).topk(slots, -1).indices
    real_XM = valid_XL.gather(-1, chosen_XM)
    order_XM = torch.where(real_XM, chosen_XM, chosen_XM - total).sort(-1).values
    return order_XM % total, order_XM >= 0


def kept(old_XMC: Tensor, new_XNC: Tensor, index_XM: Tensor, real_XM: Tensor) -> Tensor:
    """(X, M, C): stored and new entries selected by `best`; 0 in empty slots."""
    both_XLC = torch.cat([old_XMC, new_XNC.to(old_XMC.dtype).expand(*old_XMC.shape[:-2], -1, -1)], -2)
    chosen_XMC = both_XLC.gather(-2, index_XM[..., None].expand(*index_XM.shape, both_XLC.shape[-1]))
    return torch.where(real_XM[..., None], chosen_XMC, 0)


def from_last(valid_XL: Tensor) -> Tensor:
    """Number of real entries from each one to the end, itself included."""
    return valid_XL.flip(-1).cumsum(-1).flip(-1)
