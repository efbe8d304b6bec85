"""LagKV (Liang, Zhang, Li and Li 2025, arXiv:2504.04704; github.com/AI-Lab-China-Merchants-Bank/LagKV).

A token stays if its key and value spread, beside those of the text that follows it. The rule needs no query: a segment
waits in the cache, and is scored when the next one comes.

    x' = (x - min over the next segment) / (max - min + eps) per channel, for x = k and v
    score_j = (softmax_j(std over channels of k'_j) + softmax_j(std of v'_j)) / 2, as its rank in the segment
    kept = the sinks, the segment that waits, and of the others the M with the largest scores, for each head

The release cuts a text into parts of one length, where the last one and the rest wait, compares rotated keys, and
divides by zero where a channel is constant; unrotated keys make the choice independent of the place in the stream.

Legend: B rows, G heads of keys, M slots, L slots and tokens, E head width.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from cached_transformers.registry import MEMORIES
from cached_transformers.state import State

from .parts.scored_cache import STAYS, Candidates, ScoredCache

WAITS = 2.0
"""Score of a token that is not scored yet, above all others."""
EPSILON = 1e-12
"""Added to the range of a channel, which may be constant."""


@MEMORIES.register(
    "lagkv",
    paper="arXiv:2504.04704",
    title="LagKV",
    carries="in each head the keys and values that spread most beside those of the next segment",
    purpose="streams of any length through a pretrained decoder, with a choice of tokens that needs no query",
    equations="the last segment, and of each one before it the tokens that spread most, for each head",
    state="per row and layer: M (8 D + 4 H) + 8 bytes; with grouped keys M (8 G E + 4 G) + 8",
    cost="per token and layer: 2 M D multiply-adds",
    reach="unbounded for tokens that spread most in their segment",
    gradient="none: keys and values are kept as they were made",
    exact_when="length >= tokens seen",
    probe=STAYS,
)
class LagKV(ScoredCache):
    """Keys and values of the tokens that spread most beside the segment after them. No parameters.

    Args:
        width: D. heads: H.
        length: M, slots of a layer; at least those of a segment.
        cross: compare scores of different segments as they are, not their ranks.
        sinks, observe, budget, beta, index, depth, relative: see `ScoredCache`.
    """

    carries_scores = True

    def __init__(
        self,
        width: int,
        heads: int,
        length: int = 512,
        *,
        cross: bool = False,
        observe: int | None = None,
        sinks: int = 4,
        budget: Literal["uniform", "pyramid"] = "uniform",
        beta: float = 20,
        index: int | None = None,
        depth: int | None = None,
        relative: bool = True,
    ) -> None:
        shape: dict[str, Any] = {"budget": budget, "beta": beta, "index": index, "depth": depth}
        super().__init__(width, heads, length, sinks=sinks, observe=observe, relative=relative, **shape)
        self.cross = cross

    def score(self, found: Candidates, carried: State) -> Tensor:
        assert found.scores_BGL is not None
        next_BL = found.new_BL & found.valid_BL
        waits_BGL = (found.scores_BGL == WAITS) & next_BL.any(1)[:, None, None]
        spread_BGL = torch.stack([_spread(t, next_BL, waits_BGL) for t in (found.k_BGLE, found.v_BGLE)]).mean(0)
        if not self.cross:
            place_BGL = spread_BGL.masked_fill(~waits_BGL, -torch.inf).argsort(dim=-1, stable=True).argsort(-1)
            n_BG1 = waits_BGL.sum(-1, keepdim=True)
            spread_BGL = (place_BGL - place_BGL.shape[-1] + n_BG1).to(spread_BGL.dtype) / n_BG1.clamp(min=1)
        scores_BGL = torch.where(waits_BGL, spread_BGL.to(found.scores_BGL.dtype), found.scores_BGL)
        return scores_BGL.masked_fill(next_BL[:, None], WAITS)


def _spread(t_BGLE: Tensor, next_BL: Tensor, waits_BGL: Tensor) -> Tensor:
    """(B, G, L): softmax over the waiting tokens of the deviation over channels, beside the next tokens' ranges."""
    t_BGLE = t_BGLE.to(torch.promote_types(t_BGLE.dtype, torch.float32))
    hidden_B1L1 = ~next_BL[:, None, :, None]
    least_BG1E = t_BGLE.masked_fill(hidden_B1L1, torch.inf).amin(2, keepdim=True)
    most_BG1E = t_BGLE.masked_fill(hidden_B1L1, -torch.inf).amax(2, keepdim=True)
    deviation_BGL = ((t_BGLE - least_BG1E) / (most_BG1E - least_BG1E + EPSILON)).std(-1)
    return deviation_BGL.masked_fill(~waits_BGL, -torch.inf).softmax(-1)
