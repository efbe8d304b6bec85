"""Attention over regions of slots that each token chooses and weights for itself, through any core with a context.

The weights multiply values behind the softmax, query by query, which no core can do. But the core is linear in the
values: they are laid out in R + 1 blocks, each slot in the block of its region, and one call gives what each region
contributes to each token; the weighted sum of the blocks is exact, with attention dropout too.

    out_i = sum_r w_ir sum_{j in r} p_ij v_j + sum_{j in no region} p_ij v_j

Cost: R + 1 times the core's product with the values, B H N (M + N) (R + 1) E multiply-adds.

Legend: B rows, N tokens, M slots, R regions, H heads, E head width, V = (R + 1) E.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from cached_transformers.seam.memory import Context, Recalled


class Choice(NamedTuple):
    """Of which region each slot of the context is (R: of none), and what each token sees and weights."""

    region_BM: Tensor
    visible_BNR: Tensor | None
    weight_BNR: Tensor | None

    def visible(self, tokens: int) -> Tensor:
        """(B, 1, N, M + tokens) bool, over context and segment."""
        assert self.visible_BNR is not None
        n = self.visible_BNR.shape[1]
        seen_BNR = F.pad(self.visible_BNR, (0, 1), value=True)
        seen_BNM = seen_BNR.gather(2, self.region_BM[:, None].expand(-1, n, -1))
        return F.pad(seen_BNM, (0, tokens), value=True)[:, None]

    def spread(self, v_BHNE: Tensor, context: Context) -> tuple[Tensor, Context]:
        """Values of the segment and of the context, each in the block of its region; as they are without weights."""
        if self.weight_BNR is None:
            return v_BHNE, context
        regions = self.weight_BNR.shape[2]
        block_BMR = F.one_hot(self.region_BM, regions + 1).to(v_BHNE.dtype)
        v_BHMV = (context.v_BHME[..., None, :] * block_BMR[:, None, ..., None]).flatten(-2)
        return F.pad(v_BHNE, (regions * v_BHNE.shape[-1], 0)), context._replace(v_BHME=v_BHMV)

    def gather(self, out_BHNV: Tensor) -> Tensor:
        """(B, H, N, E): the weighted sum of the blocks."""
        if self.weight_BNR is None:
            return out_BHNV
        out_BHNRE = out_BHNV.unflatten(-1, (self.weight_BNR.shape[2] + 1, -1))
        weight_BHNRE = F.pad(self.weight_BNR, (0, 1), value=1.0).to(out_BHNV.dtype)[:, None, ..., None]
        return (out_BHNRE * weight_BHNRE).sum(-2)


def choice_of(recalled: Recalled, before: int, slots: int) -> Choice | None:
    """The choice that hidden states come with, over a context of `slots` slots of which `before` stand before them."""
    if recalled.region_BM is None:
        return None
    chosen = recalled.visible_BNR if recalled.visible_BNR is not None else recalled.weight_BNR
    if chosen is None:
        return None
    after = slots - before - recalled.region_BM.shape[1]
    region_BM = F.pad(recalled.region_BM, (before, after), value=chosen.shape[2])
    return Choice(region_BM, recalled.visible_BNR, recalled.weight_BNR)
