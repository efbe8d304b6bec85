"""KeyDiff (Park, Jones et al. 2025, arXiv:2504.15364).

Keys that are unlike the others get attention of their own; of many that are alike few suffice. The rule needs no query.

    score_j = -cos(k_j, mean over j of k_j / ||k_j||)
    kept = the sinks, the newest, and of the others the M with the largest scores, for each head

The paper compares keys as they are in the cache, rotated, so that their distance counts beside their content; here
unrotated ones are the default. As in the paper's loop over blocks, keys that were kept and those of a segment are
scored together.

Legend: B rows, G heads of keys, M slots, L slots and tokens, E head width.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor
from torch.nn import functional as F

from cached_transformers.registry import MEMORIES
from cached_transformers.state import State

from .parts.scored_cache import STAYS, Candidates, ScoredCache


@MEMORIES.register(
    "keydiff",
    paper="arXiv:2504.15364",
    title="KeyDiff",
    carries="in each head the keys that are least like their mean",
    purpose="streams of any length through a pretrained decoder, with a choice of tokens that needs no query",
    equations="the newest, and of the others those with the smallest cosine with the mean of unit keys, for each head",
    state="per row and layer: 8 M D + 8 bytes; with grouped keys 8 M G E + 8",
    cost="per token and layer: 2 M D multiply-adds",
    reach="unbounded for keys unlike the others",
    gradient="none: keys and values are kept as they were made",
    exact_when="length >= tokens seen",
    without={"turn": "rotated=False"},
    probe=STAYS,
)
class KeyDiff(ScoredCache):
    """Keys and values of the tokens whose keys differ most from the others. No parameters.

    Args:
        width: D. heads: H.
        length: M, slots of a layer.
        rotated: compare keys with their positions, as the paper; it needs relative=False.
        sinks, observe, budget, beta, index, depth, relative: see `ScoredCache`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        length: int = 512,
        *,
        rotated: bool = False,
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
        self.rotated = rotated
        if rotated:
            self.needs = self.needs | {"turn"}

    def score(self, found: Candidates, carried: State) -> Tensor:
        k_BGLE = F.normalize(found.turned_keys() if self.rotated else found.k_BGLE, dim=-1)
        anchor_BG1E = k_BGLE.masked_fill(~found.valid_BL[:, None, :, None], 0).sum(2, keepdim=True)
        return -F.cosine_similarity(k_BGLE, anchor_BG1E, dim=-1)
