"""Clusters of hashes: Lloyd's algorithm in Hamming space, by products of matrices of -1 and 1.

The products are integers that float32 holds exactly, so the clusters do not depend on rounding, on the
device or on the order of sums.

Legend: B rows, H heads, N hashes, R bits, C clusters.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .building_blocks import pick_rows


def lloyd(bits_BHNR: Tensor, clusters: int, iterations: int, there_BN: Tensor | None = None) -> Tensor:
    """(B, H, N): the cluster of each hash, by Lloyd's algorithm in Hamming space; the first of the nearest ones.

    Args:
        bits_BHNR: bool. clusters: C <= N. iterations: of the assignment; one less of the majorities.
        there_BN: bool, hashes that take part, at least C of them; all when None.
    """
    rows, heads, tokens, bits = bits_BHNR.shape
    sign_BHNR = bits_BHNR.float() * 2 - 1
    place_C = torch.arange(clusters, device=bits_BHNR.device)
    if there_BN is None:
        first_BC = (place_C * tokens // clusters).expand(rows, -1)
    else:
        order_BN = (~there_BN).long().argsort(dim=1, stable=True)
        first_BC = order_BN.gather(1, place_C * there_BN.sum(1, keepdim=True) // clusters)
    centroid_BHCR = pick_rows(sign_BHNR, first_BC[:, None].expand(-1, heads, -1))
    place_N = torch.arange(tokens, device=bits_BHNR.device)
    for step in range(iterations):
        nearest_BHN, index_BHN = (sign_BHNR @ centroid_BHCR.mT).max(-1)
        if step == iterations - 1:
            break
        member_BHNC = F.one_hot(index_BHN, clusters).float()
        if there_BN is not None:
            member_BHNC = member_BHNC * there_BN[:, None, :, None]
        majority_BHCR = (member_BHNC.mT @ sign_BHNR > 0).float() * 2 - 1
        # The earlier of two hashes that are equally far comes first, so that the order does not depend on the sort.
        far_BHN = (bits - nearest_BHN.long()) * tokens + (tokens - 1 - place_N)
        if there_BN is not None:
            far_BHN = far_BHN.masked_fill(~there_BN[:, None], -1)
        farthest_BHC = far_BHN.topk(clusters, -1).indices
        empty_BHC = member_BHNC.amax(2) == 0
        # The n-th of the empty clusters takes the n-th of the farthest hashes.
        taken_BHC = farthest_BHC.gather(2, (empty_BHC.cumsum(2) - 1).clamp(min=0))
        centroid_BHCR = torch.where(empty_BHC[..., None], pick_rows(sign_BHNR, taken_BHC), majority_BHCR)
    return index_BHN
