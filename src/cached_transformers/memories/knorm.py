"""Knorm (Devoto, Zhao, Scardapane and Minervini 2024, arXiv:2406.11430; github.com/alessiodevoto/l2compress).

In many pretrained decoders a key of small norm is one that gets much attention. The rule needs no query.

    score_j = -||k_j||,  kept = the sinks, the newest, and of the others the M with the largest scores, for each head

Norms do not depend on rotary positions. The observation holds for trained weights of Llama and its like, not for
layers that normalise their keys (Qwen3, Gemma 3), nor for weights as initialised.

Legend: B rows, G heads of keys, M slots, L slots and tokens, E head width.
"""

from __future__ import annotations

from torch import Tensor

from cached_transformers.registry import MEMORIES
from cached_transformers.state import State

from .parts.scored_cache import STAYS, Candidates, ScoredCache


@MEMORIES.register(
    "knorm",
    paper="arXiv:2406.11430",
    title="A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
    carries="in each head the keys of the smallest norm",
    purpose="a control for memories that choose tokens",
    equations="the newest, and of the others those with the smallest ||k||, for each head",
    state="per row and layer: 8 M D + 8 bytes; with grouped keys 8 M G E + 8",
    cost="per token and layer: 2 M D multiply-adds",
    reach="unbounded for keys of small norm",
    gradient="none: keys and values are kept as they were made",
    exact_when="length >= tokens seen",
    probe=STAYS,
)
class Knorm(ScoredCache):
    """Keys and values of the tokens whose keys have the smallest norms. No parameters.

    Args:
        width: D. heads: H.
        length: M, slots of a layer.
        sinks, observe, budget, beta, index, depth, relative: see `ScoredCache`.
    """

    def score(self, found: Candidates, carried: State) -> Tensor:
        return -found.k_BGLE.norm(dim=-1)
