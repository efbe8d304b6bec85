"""StreamingLLM (Xiao, Tian, Chen, Han and Lewis 2023, arXiv:2309.17453; github.com/mit-han-lab/streaming-llm).

Each layer attends the first S tokens of the stream, the sinks, and the last R before the segment. A softmax has to put
its weight somewhere, and models learn to put what they do not need on the first tokens: a window without them breaks a
pretrained decoder, one with them does not.

    slots = [tokens 0 ... S - 1, tokens t - R ... t - 1] at the places -(S + R) ... -1 before the segment

Places are those in the cache: no distance is one that training did not have.

Legend: B rows, N tokens, M = S + R slots, D model width, P position channels.
"""

from __future__ import annotations

from typing import Literal

from cached_transformers.interfaces.probing import Probing, one_segment, whole_episode
from cached_transformers.registry import MEMORIES

from .transformer_xl import TransformerXL


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
        super().__init__(width, heads, length, eval_length=eval_length, relative=relative, keep=keep, sinks=sinks)
