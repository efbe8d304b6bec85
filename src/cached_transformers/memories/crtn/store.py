"""The store of CRTN, whole segments, first in, first out, and the choice of some of them by each token.

Weights of regions multiply values after the softmax, query by query, which no core can do. But the core is linear in
the values: they are laid out in R + 1 blocks, each slot in the block of its region, and one call gives what each region
contributes to each token; the weighted sum of the blocks is exact, with attention dropout too.

    out_i = sum_r w_ir sum_{j in r} p_ij v_j + sum_{j in no region} p_ij v_j

The last block belongs to no region and also holds the segment's values (see `Context.gather`). Cost: R + 1 times the
core's product with the values, B H N (M + N) (R + 1) E multiply-adds.

Legend: B rows, N tokens, L places of a segment, R regions, C regions recalled, S = R L slots in the store,
M = C L slots recalled, V layers, D model width, K key width, P position channels; H heads, E head width, in `choose`
V = (R + 1) E.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.checks import none_true
from cached_transformers.interfaces.memory import Context, ProjectKV
from cached_transformers.memories.parts.fifo_store import taken


class CRTNState(NamedTuple):
    """The regions, newest last; the tokens of a region come first. Places after them count as empty.

    Attributes:
        keys_BRK: summaries.
        hidden_BVSD: inputs of each layer.
        positions_BSP: positions of the tokens.
        size_BR: tokens in each region; 0 for an empty one.
        source_BLD: input of the next query: embeddings (or top layer) of the newest region.
    """

    keys_BRK: Tensor
    hidden_BVSD: Tensor
    positions_BSP: Tensor
    size_BR: Tensor
    source_BLD: Tensor


class Slots(NamedTuple):
    """Slots of some regions: hidden states for each layer, positions, which are real, and the region of each."""

    hidden_BVMD: Tensor
    positions_BMP: Tensor
    valid_BM: Tensor
    region_BM: Tensor


def renew(state: CRTNState, new: CRTNState) -> CRTNState:
    """Drop the oldest region and add a new one (a store of one region), in the rows in which it holds any token."""
    wrote_B = new.size_BR[:, 0] > 0
    all_wrote = none_true(~wrote_B)

    def push(old: Tensor, one: Tensor, dim: int, keep: int) -> Tensor:
        shifted = torch.cat([old.narrow(dim, old.shape[dim] - keep, keep), one.to(old.dtype)], dim)
        return shifted if all_wrote else torch.where(wrote_B.view(-1, *[1] * (old.dim() - 1)), shifted, old)

    length, regions = state.source_BLD.shape[1], state.size_BR.shape[1]
    return CRTNState(
        push(state.keys_BRK, new.keys_BRK, 1, regions - 1),
        push(state.hidden_BVSD, new.hidden_BVSD, 2, (regions - 1) * length),
        push(state.positions_BSP, new.positions_BSP, 1, (regions - 1) * length),
        push(state.size_BR, new.size_BR, 1, regions - 1),
        push(state.source_BLD, new.source_BLD, 1, 0),
    )


def stored(state: CRTNState, regions_BC: Tensor) -> Slots:
    """The slots of some regions, in their order; empty ones are brought to the front."""
    length, layers, width = state.source_BLD.shape[1], *state.hidden_BVSD.shape[1::2]
    places_L = torch.arange(length, device=regions_BC.device)
    valid_BM = (places_L < state.size_BR.gather(1, regions_BC)[..., None]).flatten(1)
    index_BM = (regions_BC[..., None] * length + places_L).flatten(1)
    region_BM = regions_BC.repeat_interleave(length, 1)
    order_BM = valid_BM.to(torch.uint8).argsort(dim=1, stable=True)
    valid_BM, index_BM, region_BM = (t.gather(1, order_BM) for t in (valid_BM, index_BM, region_BM))
    hidden_BVMD = state.hidden_BVSD.gather(2, index_BM[:, None, :, None].expand(-1, layers, -1, width))
    return Slots(hidden_BVMD, state.positions_BSP.gather(1, index_BM[..., None]), valid_BM, region_BM)


def choose(
    offer: Callable[[ProjectKV], Context],
    project_kv: ProjectKV,
    *,
    region_BM: Tensor,
    visible_BNR: Tensor,
    weight_BNR: Tensor | None,
) -> Context:
    """The offered context of all regions, of which each token sees some.

    Args:
        region_BM: region of each slot; R for none, which all tokens see with weight 1.
        weight_BNR: weight of each region's values for each token, after the softmax; None for 1.
    """
    context, (tokens, regions) = offer(project_kv), visible_BNR.shape[1:]
    counted_BNR = F.pad(visible_BNR, (0, 1), value=True)
    context = context._replace(visible_BHNM=counted_BNR.gather(2, region_BM[:, None].expand(-1, tokens, -1))[:, None])
    if weight_BNR is None:
        return context
    block_BMR = F.one_hot(region_BM, regions + 1).to(context.v_BHME.dtype)
    v_BHMV = (context.v_BHME[..., None, :] * block_BMR[:, None, ..., None]).flatten(-2)
    weight_BNR = F.pad(weight_BNR, (0, 1), value=1.0)

    def gather(out_BHNV: Tensor) -> Tensor:
        """(B, H, N, E): the weighted sum of the blocks."""
        out_BHNRE = out_BHNV.unflatten(-1, (regions + 1, -1))
        return (out_BHNRE * weight_BNR.to(out_BHNV.dtype)[:, None, ..., None]).sum(-2)

    return context._replace(v_BHME=v_BHMV, gather=gather)


def windows(state: CRTNState, source_BND: Tensor, padding_BN: Tensor | None) -> tuple[Tensor, Tensor]:
    """The last L tokens up to each token, itself included, (B, N, L, D), zeros after them; and how many, (B, N)."""
    n, length = source_BND.shape[1], state.source_BLD.shape[1]
    source_BLD, source_B = pack(source_BND, padding_BN, length)
    before_B = state.size_BR[:, -1]
    # Both segments without gaps: token i of the second is at the size of the first plus i.
    places_L = torch.arange(length, device=source_B.device)
    real_BT = torch.cat([places_L < before_B[:, None], places_L < source_B[:, None]], 1)
    both_BTD = torch.where(real_BT[..., None], torch.cat([state.source_BLD.to(source_BLD.dtype), source_BLD], 1), 0)
    order_BT = (~real_BT).to(torch.uint8).argsort(dim=1, stable=True)
    count_BN = torch.arange(1, n + 1, device=source_B.device)[None] if padding_BN is None else (~padding_BN).cumsum(1)
    end_BN = before_B[:, None] + count_BN
    start_BN = (end_BN - length).clamp(min=0)
    place_BNL = (start_BN[..., None] + places_L).clamp(max=2 * length - 1)
    x_BNLD = taken(both_BTD, order_BT.gather(1, place_BNL.flatten(1))).unflatten(1, (n, length))
    return x_BNLD, end_BN - start_BN


def pack(t_BNX: Tensor, padding_BN: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
    """(B, length, X): the real tokens in front, zeros after; and how many there are in each row."""
    rows, n = t_BNX.shape[:2]
    if padding_BN is None:
        size_B = torch.full((rows,), n, device=t_BNX.device)
    else:
        order_BN = padding_BN.to(torch.uint8).argsort(dim=1, stable=True)
        t_BNX = torch.where(padding_BN.gather(1, order_BN)[..., None], 0, taken(t_BNX, order_BN))
        size_B = (~padding_BN).sum(1)
    return F.pad(t_BNX, (0, 0, 0, length - n)), size_B


def masked_softmax(score_BNR: Tensor, valid_BNR: Tensor | None) -> Tensor:
    """Softmax over valid entries, 0 elsewhere; zeros where none is valid."""
    if valid_BNR is None:
        return score_BNR.softmax(-1)
    # Not minus infinity: a row without any region would be NaN, in the gradient too.
    masked_BNR = score_BNR.masked_fill(~valid_BNR, torch.finfo(score_BNR.dtype).min)
    return torch.where(valid_BNR, masked_BNR.softmax(-1), 0)
