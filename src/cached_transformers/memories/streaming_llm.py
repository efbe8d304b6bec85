"""StreamingLLM (Xiao, Tian, Chen, Han and Lewis 2023, arXiv:2309.17453; github.com/mit-han-lab/streaming-llm).

Each layer attends the first S tokens of the stream, the sinks, and the last R before the segment. A softmax has to put
its weight somewhere, and models learn to put what they do not need on the first tokens: a window without them breaks a
pretrained decoder, one with them does not.

    slots = [tokens 0 ... S - 1, tokens t - R ... t - 1] at the places -(S + R) ... -1 before the segment

Places are those in the cache: no distance is one that training did not have.

Legend: B rows, N tokens, M = S + R slots, D model width, P position channels.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from cached_transformers.interfaces.memory import Context, ProjectKV, Trace
from cached_transformers.interfaces.probing import Probing, one_segment, whole_episode
from cached_transformers.registry import MEMORIES

from .parts.fifo_store import (
    Pairs,
    Rows,
    empty_pairs,
    empty_rows,
    keys_values,
    lined_up,
    push_either,
    refuse_training,
    right_before,
)
from .transformer_xl import TransformerXL


class SinksState(NamedTuple):
    """The first S inputs of the layer, or their keys and values, and the last R that are not among them."""

    sinks: Rows | Pairs
    recent: Rows | Pairs


@MEMORIES.register(
    "streaming_llm",
    paper="arXiv:2309.17453",
    title="StreamingLLM",
    carries="the first inputs of every layer, and the last ones",
    purpose="streams of any length through a pretrained decoder, with a window",
    equations="keys and values of [SG(first S and last R inputs of the layer), segment]; positions in the cache",
    state="per row and layer: (S + R) (4 D + 8) + 16 bytes; in evaluation with keep='kv' (S + R) (8 D + 8) + 16",
    cost="per token and layer: 2 D^2 (S + R) / N (keys and values of the slots; in evaluation with keep='kv' none) + "
    "3 (S + R) D multiply-adds",
    reach="the first S tokens, and layers x R",
    gradient="none into the memory; its keys and values train the projections",
    exact_when="sinks + length >= tokens seen",
    without={"stored_kv": "keep='hidden'"},
    probe=Probing(whole_episode, lambda *given: {**one_segment(*given), "sinks": 0}),
)
class StreamingLLM(TransformerXL):
    """Keys and values of the first `sinks` and the last `length` inputs of the layer. No parameters.

    Args:
        width: D. heads: H.
        length: R, slots of the last tokens before the segment. sinks: S; 0 is a window.
        eval_length, relative, keep: see `TransformerXL`; eval_length is of R.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        length: int = 128,
        *,
        sinks: int = 4,
        eval_length: int | None = None,
        relative: bool = True,
        keep: Literal["hidden", "kv"] = "hidden",
    ) -> None:
        super().__init__(width, heads, length, eval_length=eval_length, relative=relative, keep=keep)
        if sinks < 0:
            raise ValueError(f"sinks={sinks} must be a number of tokens, or 0 for a window without them; e.g. 4")
        self.sinks = sinks

    def init_state(self, batch_size: int, like: Tensor) -> Any:
        empty = empty_pairs if self.keep == "kv" and not self.training else empty_rows
        return SinksState(*(empty(batch_size, slots, self.width, like) for slots in (self.sinks, self._slots())))

    def open(self, state: Any, first_B1P: Tensor | None, project_kv: ProjectKV | None) -> Context:
        assert project_kv is not None and first_B1P is not None
        stored_BMW, _, valid_BM = lined_up(*state)
        if isinstance(state.recent, Pairs):
            refuse_training(self.training, type(self).__name__)
            k_BHME, v_BHME = keys_values(stored_BMW, self.heads)
        else:
            k_BHME, v_BHME = project_kv(stored_BMW)
        positions_BMP = right_before(first_B1P, valid_BM.shape[1])
        return Context(k_BHME, v_BHME, positions_BMP, valid_BM, consecutive=True, clean=True)

    def write(self, state: Any, trace: Trace) -> tuple[Any, None]:
        padding_BN = trace.query.padding_BN
        if padding_BN is None:
            padding_BN = torch.zeros_like(trace.x_BND[..., 0], dtype=torch.bool)
        later_BN = state.sinks.count_B[:, None] + (~padding_BN).cumsum(1) > self.sinks
        left_out = (padding_BN | later_BN, padding_BN | ~later_BN)
        pairs = zip(state, left_out, strict=True)
        return SinksState(*(push_either(rows, trace.x_BND, trace.query, out_BN) for rows, out_BN in pairs)), None
