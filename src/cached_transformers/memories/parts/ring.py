"""Rings of slots: entry number t of a row lies in slot t mod M, and replaces the oldest.

Legend: B rows, N new entries, M slots, X other dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cached_transformers.state import may_change


def write_rings(
    rings: Sequence[Tensor],
    new: Sequence[Tensor],
    written_B: Tensor,
    padding_BN: Tensor | None = None,
    *,
    dim: int,
) -> tuple[list[Tensor], Tensor]:
    """Append entries, detached and without padding; of more than M the last M stay. In place where `state.may_change`
    allows it.

    Args:
        rings, new: tensors with slots, or with new entries, in dimension `dim`.
        written_B: number of entries ever written.

    Returns:
        The rings and `written_B` afterwards.
    """
    slots, n = rings[0].shape[dim], new[0].shape[dim]
    count = min(n, slots)
    rank_N = torch.arange(count, device=written_B.device)
    token_BN, real_BN = None, None
    if padding_BN is None:
        total_B = torch.full_like(written_B, n)
    else:
        total_B = (~padding_BN).sum(1)
        kept_B1 = total_B.clamp(max=slots)[:, None]
        # Kept slots come first, in order; the remaining writes repeat the values already there.
        tokens_BN = padding_BN.to(torch.uint8).argsort(dim=1, stable=True)
        token_BN = tokens_BN.gather(1, (rank_N + total_B[:, None] - kept_B1).clamp(max=n - 1))
        real_BN = rank_N < kept_B1
    first_B = written_B + total_B - total_B.clamp(max=slots)
    slot_BN = (first_B[:, None] + rank_N) % slots
    in_place = may_change(*rings)

    def put(old: Tensor, fresh: Tensor) -> Tensor:
        def of(index_BN: Tensor) -> Tensor:
            sizes = [len(index_BN), *[1] * (dim - 1), count, *[1] * (old.dim() - dim - 1)]
            return index_BN.view(sizes).expand(*old.shape[:dim], count, *old.shape[dim + 1 :])

        fresh = fresh.detach().to(old.dtype)
        if token_BN is None or real_BN is None:
            fresh = fresh.narrow(dim, n - count, count)
        else:
            fresh = torch.where(of(real_BN), fresh.gather(dim, of(token_BN)), old.gather(dim, of(slot_BN)))
        return (old.scatter_ if in_place else old.scatter)(dim, of(slot_BN), fresh)

    return [put(old, fresh) for old, fresh in zip(rings, new, strict=True)], written_B + total_B
