"""SnapKV (Li, Huang, Yang et al. 2024, arXiv:2404.14469; github.com/FasterDecoding/SnapKV).

The last queries of a text tell which keys its continuation needs. Their weights are pooled over neighbours, so that a
token stays with those around it.

    score_j = mean over the group's heads of pool(mean over the last W queries of softmax(q_i k_j^T / sqrt(E)))
    kept = the last W keys, the sinks, and of the others the M - W - sinks with the largest scores, for each head

The released code sums over the queries and keeps a set per head of queries; the mean over the heads that share a key
is kvpress's (github.com/NVIDIA/kvpress). Here the choice is made at the end of every segment, of slots and segment.

Legend: B rows, H heads, G heads of keys, W queries, M slots, L slots and tokens, E head width.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.checks import at_least_one
from cached_transformers.registry import MEMORIES
from cached_transformers.state import State

from .parts.scored_cache import STAYS, Candidates, ScoredCache


@MEMORIES.register(
    "snapkv",
    paper="arXiv:2404.14469",
    title="SnapKV",
    carries="in each head the keys, with their neighbours, that the last queries attended most",
    purpose="streams of any length through a pretrained decoder, with a choice of tokens",
    equations="the last W, and of the others those with the largest pooled mean weight of the last W queries",
    state="per row and layer: 8 M D + 8 bytes; with grouped keys 8 M G E + 8",
    cost="per token and layer: 2 M D + W (M + N) D / N (weights) multiply-adds",
    reach="unbounded for attended tokens",
    gradient="none: keys and values are kept as they were made",
    exact_when="length >= tokens seen",
    probe=STAYS,
)
class SnapKV(ScoredCache):
    """Keys and values that the last `observe` queries attended most. No parameters.

    Args:
        width: D. heads: H.
        length: M, slots of a layer.
        kernel: width of the average pool over neighbouring keys, odd; 1 pools nothing.
        sinks, observe, budget, beta, index, depth, relative: see `ScoredCache`; `observe` is W.
    """

    needs = ScoredCache.needs | {"weights"}

    def __init__(
        self,
        width: int,
        heads: int,
        length: int = 512,
        *,
        observe: int | None = None,
        kernel: int = 5,
        sinks: int = 4,
        budget: Literal["uniform", "pyramid"] = "uniform",
        beta: float = 20,
        index: int | None = None,
        depth: int | None = None,
        relative: bool = True,
    ) -> None:
        at_least_one(observe=observe, kernel=kernel)
        if kernel % 2 == 0:
            raise ValueError(f"kernel={kernel} must be odd, so that a pool has a middle; take {kernel + 1}")
        shape: dict[str, Any] = {"budget": budget, "beta": beta, "index": index, "depth": depth}
        super().__init__(width, heads, length, sinks=sinks, observe=observe, relative=relative, **shape)
        self.kernel = kernel

    def score(self, found: Candidates, carried: State) -> Tensor:
        weights_BHWL = found.weights_BHWL
        assert weights_BHWL is not None
        asked_BH1 = (~weights_BHWL.isnan()).any(-1).sum(2, keepdim=True)
        mean_BHL = weights_BHWL.nan_to_num(0).sum(2) / asked_BH1.clamp(min=1)
        # The window's own weights are no neighbours of older keys; padding of a pool counts.
        older_BHL = mean_BHL[..., : max(mean_BHL.shape[-1] - self.newest, 0)]
        pooled_BHL = F.avg_pool1d(older_BHL, self.kernel, 1, self.kernel // 2)
        pooled_BHL = F.pad(pooled_BHL, (0, mean_BHL.shape[-1] - older_BHL.shape[-1]), value=torch.inf)
        return pooled_BHL.unflatten(1, (self.stored_heads[0], -1)).mean(2)
