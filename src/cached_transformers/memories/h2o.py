"""Heavy-Hitter Oracle (Zhang et al. 2023, arXiv:2306.14048; github.com/FMInference/H2O).

Few keys get most of the attention, and those that got it will get it again. Each head of keys keeps the keys that
received most so far, and the last ones, which had no time to.

    score_j = sum over all queries so far, mean over the queries' heads that share key j, of the weight of key j
    kept = the last R keys, and of the others the `heavy` with the largest scores

A dropped key loses its score. One step is one segment: with segments of one token it is the released form. The
released code adds scores up over a batch; here each row has its own.

Legend: B rows, H heads, G heads of keys, N tokens, W observed queries, M = heavy + R slots, L = M + N, E head width,
D model width.
"""

from __future__ import annotations

from torch import Tensor

from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.probing import Probing, one_segment
from cached_transformers.registry import MEMORIES
from cached_transformers.state import State

from .parts.options import NO_MEMORY
from .parts.scored_cache import Candidates, ScoredCache


@MEMORIES.register(
    "h2o",
    paper="arXiv:2306.14048",
    title="Heavy-Hitter Oracle",
    carries="in each head the keys that were attended most, and the last ones",
    purpose="streams of any length through a pretrained decoder, with a choice of tokens",
    equations="the last R, and of the others the `heavy` with the largest sum of weights so far, for each head",
    state="per row and layer: M (8 D + 4 H) + 8 bytes, M = heavy + length; with grouped keys M (8 G E + 4 G) + 8",
    cost="per token and layer: 2 M D + (M + N) D (weights; with observe=W times W / N) multiply-adds",
    reach="unbounded for attended tokens",
    gradient="none: keys and values are kept as they were made",
    exact_when="heavy + length >= tokens seen",
    probe=Probing(
        lambda segment, distance, depth: {"heavy": distance * segment, "length": segment},
        lambda *given: {"heavy": 0, **one_segment(*given)},
    ),
)
class H2O(ScoredCache):
    """Keys and values to which the queries of each head gave most weight so far, and the last ones. No parameters.

    They are kept as they were made, without a gradient, at their places in the cache, right before the segment, since
    each head keeps other ones.

    Args:
        width: D. heads: H.
        length: R, slots of the last tokens. heavy: slots of those that were attended most; 0 is a window.
        observe: number of a segment's last queries whose weights count; all when None.
        relative: see `TransformerXL`.
    """

    needs = ScoredCache.needs | {"weights"}
    carries_scores = True

    def __init__(
        self,
        width: int,
        heads: int,
        length: int = 64,
        *,
        heavy: int = 64,
        observe: int | None = None,
        relative: bool = True,
    ) -> None:
        at_least_one(NO_MEMORY, length=length)
        at_least_one(f"; 0 is a window of length={length}", least=0, heavy=heavy)
        at_least_one("; None for all", observe=observe)
        super().__init__(width, heads, heavy + length, sinks=0, observe=length, relative=relative)
        self.length, self.heavy, self.observe = length, heavy, observe

    def score(self, found: Candidates, carried: State) -> Tensor:
        assert found.weights_BHWL is not None and found.scores_BGL is not None
        received_BHL = found.weights_BHWL.nansum(2)
        return found.scores_BGL + received_BHL.unflatten(1, (self.stored_heads[0], -1)).mean(2)
