"""Token Omission Via Attention (Oren, Hassid, Yarden, Adi and Schwartz 2024, arXiv:2401.06104;
github.com/schwartz-lab-NLP/TOVA).

A transformer with a bounded cache is a recurrent network whose state has C slots. When there are more keys than slots,
the last query says which of them stay, for all heads of the layer alike.

    w = mean over heads of softmax(q_last K^T / sqrt(E)),  kept = the C keys of cache and segment with the largest w

The key that the last token needed least is dropped, perhaps its own. One step is one segment: with segments of one
token it is the released form; longer ones choose less often, by their last token.

Legend: B rows, N tokens, M slots, L = M + N, D model width, P position channels.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from cached_transformers.interfaces.memory import Context, ProjectKV, Trace
from cached_transformers.interfaces.probing import Probing, whole_episode
from cached_transformers.registry import MEMORIES

from .parts.fifo_store import Pairs, Rows, best, kept, right_before, side_by_side, stored_pair
from .transformer_xl import TransformerXL


@MEMORIES.register(
    "tova",
    paper="arXiv:2401.06104",
    title="Token Omission Via Attention",
    carries="the inputs of every layer that its last token attended most",
    purpose="streams of any length through a pretrained decoder, with a choice of tokens",
    equations="the M of cache and segment with the largest mean weight over heads of the last query",
    state="per row and layer: M (4 D + 8) + 8 bytes; in evaluation with keep='kv' M (8 D + 8) + 8",
    cost="per token and layer: 2 D^2 M / N (keys and values of the slots; in evaluation with keep='kv' none) + 3 M D + "
    "(M + N) D / N (weights) multiply-adds with places='cache'; relative positions of places='stream' cost "
    "more, since slots are no neighbours",
    reach="unbounded for tokens that the last query of every segment attends",
    gradient="none into the memory; its keys and values train the projections",
    exact_when="length >= tokens seen",
    without={"stored_kv": "keep='hidden'"},
    probe=Probing(whole_episode, why="what is attended may stay for ever"),
)
class TOVA(TransformerXL):
    """Keys and values of the `length` inputs of the layer to which its last query gave most weight. No parameters.

    Args:
        width: D. heads: H.
        length: M, slots. eval_length, relative, keep: see `TransformerXL`.
        places: position of kept keys: their place in the "stream", as in the releases, or in the "cache",
            right before the segment, so that no distance is one that training did not have.
    """

    needs = frozenset({"state", "context", "weights"})
    observe = 1

    def __init__(
        self,
        width: int,
        heads: int,
        length: int = 128,
        *,
        eval_length: int | None = None,
        places: Literal["stream", "cache"] = "stream",
        relative: bool = True,
        keep: Literal["hidden", "kv"] = "hidden",
    ) -> None:
        super().__init__(width, heads, length, eval_length=eval_length, relative=relative, keep=keep)
        self.places = places

    def open(self, state: Rows | Pairs, first_B1P: Tensor | None, project_kv: ProjectKV | None) -> Context:
        context = super().open(state, first_B1P, project_kv)
        if self.places == "stream":
            return context._replace(consecutive=False)
        assert first_B1P is not None
        return context._replace(positions_BMP=right_before(first_B1P, context.valid_BM.shape[1]))

    def write(self, state: Rows | Pairs, trace: Trace) -> tuple[Rows | Pairs, None]:
        query, weights_BHWL = trace.query, trace.weights_BHWL
        assert weights_BHWL is not None and query.positions_BNP is not None
        new_BNW = trace.x_BND.detach()
        if isinstance(state, Pairs):
            new_BNW = side_by_side(*stored_pair(query, self.stored_heads[0]))
        n = new_BNW.shape[1]
        # The context may begin with slots of other memories; its own are the last ones before the segment.
        slots = state.positions_BMP.shape[1]
        asked_BL = weights_BHWL[:, :, -1, weights_BHWL.shape[-1] - n - slots :].mean(1)
        valid_BL = torch.cat([state.valid_BM, query.real_BN], 1)
        # A segment of padding asks nothing: all that is there stays.
        index_BM, real_BM = best(asked_BL.nan_to_num(0), valid_BL, slots)
        stored_BMW = kept(state[0], new_BNW, index_BM, real_BM)
        positions_BMP = kept(state.positions_BMP, query.positions_BNP, index_BM, real_BM)
        return type(state)(stored_BMW, positions_BMP, real_BM.sum(1)), None
