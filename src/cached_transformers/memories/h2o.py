"""Heavy-Hitter Oracle (Zhang et al. 2023, arXiv:2306.14048; github.com/FMInference/H2O).

Few keys get most of the attention, and those that got it will get it again. Each head of keys keeps the keys that
received most so far, and the last ones, which had no time to.

    score_j = sum over all queries so far, mean over the queries' heads that share key j, of the weight of key j
    kept = the last R keys, and of the others the `heavy` with the largest scores

A dropped key loses its score. One step is one segment: with segments of one token it is the released form. The
released code adds scores up over a batch; here each row has its own.

Legend: B rows, H heads, G heads of keys, N tokens, M = heavy + R slots, L = M + N, E head width,
D model width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.memory import Context, ProjectKV, Trace
from cached_transformers.interfaces.probing import Probing, one_segment
from cached_transformers.registry import MEMORIES

from .parts.fifo_store import best, from_last, kept, last_slots, right_before, stored_pair
from .transformer_xl import TransformerXL


class HeavyHitters(NamedTuple):
    """Unrotated keys and values of each head, oldest first, empty slots in front; the weight that each received; how
    many are real, in all heads alike."""

    k_BGME: Tensor
    v_BGME: Tensor
    scores_BGM: Tensor
    count_B: Tensor

    @property
    def valid_BM(self) -> Tensor:
        """bool, the slots that hold something."""
        return last_slots(self.count_B, self.scores_BGM.shape[2])


@MEMORIES.register(
    "h2o",
    paper="arXiv:2306.14048",
    title="Heavy-Hitter Oracle",
    carries="in each head the keys that were attended most, and the last ones",
    purpose="streams of any length through a pretrained decoder, with a choice of tokens",
    equations="the last R, and of the others the `heavy` with the largest sum of weights so far, for each head",
    state="per row and layer: M (8 D + 4 H) + 8 bytes, M = heavy + length; with grouped keys M (8 G E + 4 G) + 8",
    cost="per token and layer: 2 M D + (M + N) D (weights) multiply-adds",
    reach="unbounded for attended tokens",
    gradient="none: keys and values are kept as they were made",
    exact_when="heavy + length >= tokens seen",
    probe=Probing(
        lambda segment, distance, depth: {"heavy": distance * segment, "length": segment},
        lambda *given: {"heavy": 0, **one_segment(*given)},
    ),
)
class H2O(TransformerXL):
    """Keys and values to which the queries of each head gave most weight so far, and the last ones. No parameters.

    They are kept as they were made, without a gradient, at their places in the cache, right before the segment, since
    each head keeps other ones.

    Args:
        width: D. heads: H.
        length: R, slots of the last tokens. heavy: slots of those that were attended most; 0 is a window.
        observe: number of a segment's last queries whose weights count; all when None.
        relative: see `TransformerXL`.
    """

    needs = frozenset({"state", "context", "stored_kv", "weights"})

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
        super().__init__(width, heads, length, relative=relative)
        at_least_one(f"; 0 is a window of length={length}", least=0, heavy=heavy)
        at_least_one("; None for all", observe=observe)
        self.heavy, self.observe = heavy, observe

    def init_state(self, batch_size: int, like: Tensor) -> HeavyHitters:
        slots, (groups, width) = self.heavy + self.length, self.stored_heads
        k_BGME, v_BGME = (like.new_zeros(batch_size, groups, slots, width) for _ in range(2))
        wide = torch.promote_types(like.dtype, torch.float32)  # a sum of many small weights
        scores_BGM = like.new_zeros(batch_size, groups, slots, dtype=wide)
        return HeavyHitters(k_BGME, v_BGME, scores_BGM, torch.zeros(batch_size, dtype=torch.long, device=like.device))

    def open(self, state: HeavyHitters, first_B1P: Tensor | None, project_kv: ProjectKV | None) -> Context:
        assert first_B1P is not None
        positions_BMP = right_before(first_B1P, state.scores_BGM.shape[2])
        return Context(state.k_BGME, state.v_BGME, positions_BMP, state.valid_BM, consecutive=True)

    def write(self, state: HeavyHitters, trace: Trace) -> tuple[HeavyHitters, None]:
        query, weights_BHWL = trace.query, trace.weights_BHWL
        assert weights_BHWL is not None
        k_BGNE, v_BGNE = stored_pair(query, self.stored_heads[0])
        rows, groups, n = k_BGNE.shape[:3]
        slots = state.scores_BGM.shape[2]
        # The context may begin with slots of other memories; its own are the last ones before the segment.
        received_BHL = weights_BHWL[..., weights_BHWL.shape[-1] - n - slots :].nan_to_num(0).sum(2)
        received_BGL = received_BHL.unflatten(1, (groups, -1)).mean(2)
        before_BGL = torch.cat([state.scores_BGM, received_BGL.new_zeros(rows, groups, n)], 2)
        scores_BGL = before_BGL + received_BGL
        real_BN = torch.ones_like(query.x_BND[..., 0], dtype=torch.bool)
        if query.padding_BN is not None:
            real_BN = ~query.padding_BN
        valid_BL = torch.cat([state.valid_BM, real_BN.expand(rows, -1)], 1)
        last_B1L = (from_last(valid_BL) <= self.length)[:, None]
        valid_BGL = valid_BL[:, None].expand_as(scores_BGL)
        index_BGM, real_BGM = best(scores_BGL.masked_fill(last_B1L, torch.inf), valid_BGL, slots)
        scores_BGM = torch.where(real_BGM, scores_BGL.gather(2, index_BGM), 0).to(state.scores_BGM.dtype)
        pairs = (state.k_BGME, k_BGNE), (state.v_BGME, v_BGNE)
        k_BGME, v_BGME = (kept(old, new, index_BGM, real_BGM) for old, new in pairs)
        return HeavyHitters(k_BGME, v_BGME, scores_BGM, real_BGM[:, 0].sum(1)), None
