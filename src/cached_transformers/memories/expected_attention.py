"""Expected Attention (Devoto, Jeblick and Jegou 2025, arXiv:2510.00636; github.com/NVIDIA/kvpress).

The queries of a layer are nearly Gaussian. Those to come are expected to be as those so far, turned by the mean
rotation of the next F places, and the mean of exp(q k^T) over a Gaussian query is known:

    mu, Sigma = mean and covariance of all unrotated queries after the sinks;  R = mean rotation of the next F places
    z_j = k_j . R mu / sqrt(E) + k_j^T R Sigma R^T k_j / (2 E),  k_j rotated at its place
    score_j = (mean over the group's heads of softmax_j(z) + epsilon) ||v_j||
    kept = the sinks, the newest, and of the others the M with the largest scores, for each head

The release takes the queries of one text; here sums over the queries of the whole stream are carried. Without rotary
positions R = 1.

Legend: B rows, H heads, G heads of keys, R heads of queries per key, N tokens, M slots, L slots and tokens,
E = F head width, S future places, P position channels.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.memory import Trace
from cached_transformers.registry import MEMORIES

from .parts.scored_cache import STAYS, Candidates, ScoredCache


class QuerySums(NamedTuple):
    """Tokens seen, and sums over the unrotated queries after the sinks, and over their outer products."""

    seen_B: Tensor
    sum_BHE: Tensor
    outer_BHEE: Tensor


@MEMORIES.register(
    "expected_attention",
    paper="arXiv:2510.00636",
    title="Expected Attention",
    carries="in each head the keys that queries to come are expected to attend, and sums over the queries so far",
    purpose="streams of any length through a pretrained decoder, with a choice of tokens for later questions",
    equations="the newest, and of the others those with the largest expected weight times ||v||, for each head",
    state="per row and layer: 8 M D + 4 H (E + E^2) + 16 bytes; with grouped keys 8 M G E instead of 8 M D",
    cost="per token and layer: 2 M D + D E + ((M + N) D (E + 1) + 2 D E (E + 1)) / N multiply-adds",
    reach="unbounded for keys that the queries so far would attend",
    gradient="none: keys and values are kept as they were made",
    exact_when="length >= tokens seen",
    probe=STAYS,
)
class ExpectedAttention(ScoredCache):
    """Keys and values that later queries are expected to attend most. No parameters.

    Args:
        width: D. heads: H.
        length: M, slots of a layer.
        future: number of places after the segment whose queries are expected.
        epsilon: added to the expected weights, so that the norm of a value counts for a key that is not attended.
        covariance: count the spread of the queries, not only their mean.
        value_norm: multiply by the norms of values.
        sinks, observe, budget, beta, index, depth: see `ScoredCache`.
        relative: False, since keys must be turned; see `TransformerXL`.
    """

    needs = ScoredCache.needs | {"turn"}

    def __init__(
        self,
        width: int,
        heads: int,
        length: int = 512,
        *,
        future: int = 512,
        epsilon: float = 0.0,
        covariance: bool = True,
        value_norm: bool = True,
        observe: int | None = None,
        sinks: int = 4,
        budget: Literal["uniform", "pyramid"] = "uniform",
        beta: float = 20,
        index: int | None = None,
        depth: int | None = None,
        relative: bool = False,
    ) -> None:
        shape: dict[str, Any] = {"budget": budget, "beta": beta, "index": index, "depth": depth}
        super().__init__(width, heads, length, sinks=sinks, observe=observe, relative=relative, **shape)
        at_least_one(future=future)
        if not 0 <= epsilon < math.inf:
            raise ValueError(f"epsilon={epsilon} must be at least 0 and finite")
        self.future, self.epsilon, self.covariance, self.value_norm = future, epsilon, covariance, value_norm

    def init_carried(self, batch_size: int, like: Tensor) -> QuerySums:
        width, wide = self.stored_heads[1], torch.promote_types(like.dtype, torch.float32)
        sum_BHE = like.new_zeros(batch_size, self.heads, width, dtype=wide)
        seen_B = torch.zeros(batch_size, dtype=torch.long, device=like.device)
        return QuerySums(seen_B, sum_BHE, like.new_zeros(batch_size, self.heads, width, width, dtype=wide))

    def carry(self, carried: QuerySums, trace: Trace) -> QuerySums:
        query = trace.query
        assert query.q_BHNE is not None
        real_BN = query.real_BN
        rank_BN = carried.seen_B[:, None] + real_BN.long().cumsum(1)
        counted_BN = real_BN & (rank_BN > self.sinks)
        q_BHNE = query.q_BHNE.detach().to(carried.sum_BHE.dtype)
        q_BHNE = torch.where(counted_BN[:, None, :, None], q_BHNE, 0)
        sum_BHE, outer_BHEE = carried.sum_BHE + q_BHNE.sum(2), carried.outer_BHEE + q_BHNE.mT @ q_BHNE
        return QuerySums(carried.seen_B + real_BN.sum(1), sum_BHE, outer_BHEE)

    @torch.no_grad()
    def score(self, found: Candidates, carried: QuerySums) -> Tensor:
        k_BGLE, turned_EE = self._turned(found)
        n_B111 = (carried.seen_B - self.sinks).clamp(min=1)[:, None, None, None]
        mean_BH1E = carried.sum_BHE[:, :, None] / n_B111
        groups, width = self.stored_heads
        mu_BGRE = (mean_BH1E @ turned_EE)[:, :, 0].unflatten(1, (groups, -1))
        z_BGRL = mu_BGRE @ k_BGLE.mT / math.sqrt(width)
        if self.covariance:
            covariance_BHEE = carried.outer_BHEE / n_B111 - mean_BH1E.mT @ mean_BH1E
            sigma_BGRFF = (turned_EE.mT @ covariance_BHEE @ turned_EE).unflatten(1, (groups, -1))
            k_BG1LE = k_BGLE[:, :, None]
            z_BGRL = z_BGRL + ((k_BG1LE @ sigma_BGRFF) * k_BG1LE).sum(-1) / (2 * width)
        counted_BL = found.valid_BL & (found.rank_BL() > self.sinks)
        z_BGRL = z_BGRL.masked_fill(~counted_BL[:, None, None], torch.finfo(z_BGRL.dtype).min)
        weight_BGL = z_BGRL.softmax(-1).mean(2) + self.epsilon
        return weight_BGL * found.v_BGLE.to(weight_BGL.dtype).norm(dim=-1) if self.value_norm else weight_BGL

    def _turned(self, found: Candidates) -> tuple[Tensor, Tensor]:
        """Keys at their places, and the mean rotation of the places after the last token, as a map of row vectors.

        Only distances count: all rows are moved so that the future ends at the first row's last token, and no place is
        beyond those of the segment, by which some layers scale their angles.
        """
        turn, device = found.query.turn, found.k_BGLE.device
        assert turn is not None
        last_B1P = found.places_BLP[:, -1:]
        future_1SP = last_B1P[:1] - torch.arange(self.future, device=device)[None, :, None]
        places_BLP = found.places_BLP - last_B1P + last_B1P[:1] - self.future
        wide = torch.promote_types(found.k_BGLE.dtype, torch.float32)
        eye_1ESE = torch.eye(found.k_BGLE.shape[-1], dtype=found.k_BGLE.dtype, device=device)[None, :, None]
        turned_1ESE = turn(eye_1ESE.expand(-1, -1, self.future, -1), future_1SP)
        return turn(found.k_BGLE, places_BLP).to(wide), turned_1ESE.to(wide).mean(2)[0]
