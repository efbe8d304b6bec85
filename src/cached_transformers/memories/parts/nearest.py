"""The nearest keys of a store by all products, which never are in memory at once.

The store is read in chunks of slots, and the best of each join the best so far. On a CPU a block of slots whose largest
product is below the least of the best so far is passed over. There 1 of every 2^j slots comes first, then those half
way between: a store whose later keys are ever nearer would otherwise be nothing but candidates.

Legend: B rows, H heads, N queries, M slots, K neighbours, E head width, C slots of a chunk, S slots half way between
those that were looked at, G blocks of a chunk, W slots of a block, P candidates, L places for K and candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCORES = 2**26
"""Bytes of the products that are made at once."""
CACHED = 2**23
"""The same where each chunk is looked at while it is in the processor's cache."""
BLOCK = 16
"""Slots per block whose largest product is compared."""
FIRST = 256
"""Least number of slots for the first threshold."""


@torch.no_grad()
def nearest(q_BHNE: Tensor, k_BHME: Tensor, filled_B: Tensor, neighbours: int) -> Tensor:
    """(B, H, N, K): slots of the keys with the largest products, the largest first; -1 where there is none.

    Of equal products any may be taken.
    """
    rows, heads, n, _ = q_BHNE.shape
    slots = k_BHME.shape[2]
    chunk = max(SCORES // max(rows * heads * n * k_BHME.element_size(), 1), neighbours)
    with torch.autocast(q_BHNE.device.type, enabled=False):  # half precision would confuse near neighbours
        q_BHNE = q_BHNE.to(k_BHME.dtype)
        if slots > chunk and k_BHME.device.type == "cpu" and not torch.compiler.is_compiling():
            return _by_threshold(q_BHNE, k_BHME, filled_B, neighbours)
        return _by_chunks(q_BHNE, k_BHME, filled_B, neighbours, chunk)


def _by_chunks(q_BHNE: Tensor, k_BHME: Tensor, filled_B: Tensor, neighbours: int, chunk: int) -> Tensor:
    """Fixed shapes, as compilers need them."""
    filled_B111 = filled_B[:, None, None, None]
    slot_M = torch.arange(k_BHME.shape[2], device=k_BHME.device)
    best, index = None, None
    for k_BHCE, slot_C in zip(k_BHME.split(chunk, 2), slot_M.split(chunk), strict=True):
        scores_BHNC = (q_BHNE @ k_BHCE.mT).masked_fill_(slot_C >= filled_B111, -torch.inf)
        found = scores_BHNC.topk(min(neighbours, len(slot_C)), -1)
        if best is None or index is None:
            best, index = found.values, found.indices
            continue
        both = torch.cat([best, found.values], -1).topk(neighbours, -1)
        index = torch.cat([index, slot_C[found.indices]], -1).gather(-1, both.indices)
        best = both.values
    assert index is not None
    return torch.where(torch.arange(neighbours, device=index.device) < filled_B111, index, -1)


def _by_threshold(q_BHNE: Tensor, k_BHME: Tensor, filled_B: Tensor, neighbours: int) -> Tensor:
    """One row and head after the other, and no empty slot of them."""
    index = filled_B.new_full((*q_BHNE.shape[:3], neighbours), -1)
    for row, filled in enumerate(filled_B.tolist()):
        for head in range(q_BHNE.shape[1] if filled else 0):
            found_NK = _of_head(q_BHNE[row, head], k_BHME[row, head, :filled], min(neighbours, filled))
            index[row, head, :, : found_NK.shape[1]] = found_NK
    return index


def _of_head(q_NE: Tensor, k_ME: Tensor, neighbours: int) -> Tensor:
    """(N, K) slots, the nearest first."""
    n, filled = len(q_NE), len(k_ME)
    step = 1
    while filled // (2 * step) >= max(FIRST, 2 * neighbours):
        step *= 2
    best_NK, order_NK = (q_NE @ k_ME[::step].mT).topk(neighbours, -1)
    index_NK = order_NK * step
    chunk = max(CACHED // (n * k_ME.element_size()) // BLOCK, 1) * BLOCK
    scratch_CN = k_ME.new_empty(min(chunk, filled), n)
    while step > 1:
        step //= 2
        k_SE, begin = k_ME[step :: 2 * step], 0  # those half way between the slots that were looked at
        candidates: list[tuple[Tensor, Tensor, Tensor]] = []
        for k_CE in k_SE.split(chunk):
            scores_CN = torch.mm(k_CE, q_NE.mT, out=scratch_CN[: len(k_CE)])
            query_P, place_P, score_P = _above(scores_CN, best_NK[:, -1])
            candidates.append((query_P, (place_P + begin) * (2 * step) + step, score_P))
            begin += len(k_CE)
            if sum(len(part) for part, _, _ in candidates) > 2 * best_NK.numel() or begin == len(k_SE):
                best_NK, index_NK = _joined(best_NK, index_NK, *map(torch.cat, zip(*candidates, strict=True)))
                candidates = []
    return index_NK


def _above(scores_CN: Tensor, least_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, place in the chunk, and product of all products that are larger than the least that their query has."""
    whole = len(scores_CN) // BLOCK * BLOCK
    scores_GWN = scores_CN[:whole].unflatten(0, (-1, BLOCK))
    block_P, query_P = (scores_GWN.amax(1) > least_N).nonzero().unbind(1)
    scores_PW = scores_GWN.transpose(1, 2)[block_P, query_P]
    hit_P, place_P = (scores_PW > least_N[query_P, None]).nonzero().unbind(1)
    rest_P, last_P = (scores_CN[whole:] > least_N).nonzero().unbind(1)
    return (
        torch.cat([query_P[hit_P], last_P]),
        torch.cat([block_P[hit_P] * BLOCK + place_P, rest_P + whole]),
        torch.cat([scores_PW[hit_P, place_P], scores_CN[whole:][rest_P, last_P]]),
    )


def _joined(
    best_NK: Tensor, index_NK: Tensor, query_P: Tensor, slot_P: Tensor, score_P: Tensor
) -> tuple[Tensor, Tensor]:
    """The best of each query among those so far and its candidates."""
    if not len(query_P):
        return best_NK, index_NK
    n, neighbours = best_NK.shape
    query_P, order_P = query_P.sort(stable=True)
    count_N = torch.bincount(query_P, minlength=n)
    place_P = torch.arange(len(query_P)) - (count_N.cumsum(0) - count_N)[query_P] + neighbours
    size = neighbours + int(count_N.max())
    best_NL, index_NL = best_NK.new_full((n, size), -torch.inf), index_NK.new_zeros(n, size)
    best_NL[:, :neighbours], index_NL[:, :neighbours] = best_NK, index_NK
    best_NL[query_P, place_P], index_NL[query_P, place_P] = score_P[order_P], slot_P[order_P]
    best_NK, order_NK = best_NL.topk(neighbours, -1)
    return best_NK, index_NL.gather(1, order_NK)
