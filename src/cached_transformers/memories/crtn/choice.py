"""Regions of slots that each token chooses and weights for itself, through any core with a context.

The weights multiply values after the softmax, query by query, which no core can do. But the core is linear in the
values: they are laid out in R + 1 blocks, each slot in the block of its region, and one call gives what each region
contributes to each token; the weighted sum of the blocks is exact, with attention dropout too.

    out_i = sum_r w_ir sum_{j in r} p_ij v_j + sum_{j in no region} p_ij v_j

The last block belongs to no region and also holds the segment's values (see `Context.gather`).

Cost: R + 1 times the core's product with the values, B H N (M + N) (R + 1) E multiply-adds.

Legend: B rows, N tokens, M slots, R regions, H heads, E head width, V = (R + 1) E.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from cached_transformers.interfaces.memory import Context


def choose(context: Context, region_BM: Tensor, visible_BNR: Tensor, weight_BNR: Tensor | None) -> Context:
    """The context, of whose regions each token sees some, with weights.

    Args:
        context: of all regions.
        region_BM: region of each slot; R for none, which all tokens see with weight 1.
        visible_BNR: bool, the regions that each token sees.
        weight_BNR: weight of each region's values for each token, after the softmax; None for 1.
    """
    tokens, regions = visible_BNR.shape[1:]
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
