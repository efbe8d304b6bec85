"""Transformer-XL (Dai et al. 2019, arXiv:1901.02860; github.com/kimiyoung/transformer-xl).

Each layer attends the inputs that it saw in earlier segments, detached, with positions given as distances.

    Mem(n, t) = SG[O^{n-1}_{t-m} ... O^{n-1}_{t-1}],  keys and values of [Mem(n, t), O^{n-1}_t]

Legend: B rows, N tokens, M slots, H heads, D model width.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.memory import Context, ProjectKV, Query, Reading
from cached_transformers.interfaces.probing import Probing, one_segment, whole_episode
from cached_transformers.positions import Positions, RelativePositions
from cached_transformers.registry import MEMORIES

from .parts.fifo_store import Pairs, Rows, read_store
from .parts.options import NO_MEMORY
from .parts.sinks import KeepsSinks, SinksState, placed


@MEMORIES.register(
    "transformer_xl",
    paper="arXiv:1901.02860",
    title="Transformer-XL",
    carries="the last inputs of every layer",
    purpose="the last tokens as they were",
    equations="keys and values of [SG(last M inputs of the layer), segment]; positions as distances",
    state="per row and layer: M (4 D + 8) + 8 bytes; in evaluation with keep='kv' M (8 D + 8) + 8",
    cost="per token and layer: 2 D^2 M / N (keys and values of the memory; in evaluation with keep='kv' none) + 3 M D "
    "multiply-adds",
    reach="layers x M tokens",
    gradient="none into the memory; its keys and values train the projections",
    exact_when="length >= tokens seen",
    without={"bias": "same_length=False", "stored_kv": "keep='hidden'"},
    probe=Probing(whole_episode, one_segment),
)
class TransformerXL(KeepsSinks):
    """Keys and values of the last `length` inputs of the layer.

    Args:
        width: D. heads: H.
        length: M, slots. eval_length: M of states made in evaluation mode; `length` when None.
        same_length: a token sees exactly the last `length` tokens (itself included) once that many exist,
            and results do not depend on how a text is cut; without it, it sees the whole memory.
        relative: own position scheme, with u, v and W_r per layer; False takes the model's scheme, the only one in
            host models.
        clamp: distances beyond it count as it.
        keep: what states made in evaluation mode hold: "hidden" states, as in training, whose keys and values are made
            again at each segment; or these ("kv"), made once, in twice the bytes. With other weights they mean nothing.
        sinks: first tokens of a row's stream that stay for good, beside the last `length`; pretrained decoders break
            without them. 4 in decoders of transformers.
    """

    needs = frozenset({"state", "context"})

    def __init__(
        self,
        width: int,
        heads: int,
        length: int = 128,
        *,
        eval_length: int | None = None,
        same_length: bool = False,
        relative: bool = True,
        clamp: int | None = None,
        keep: Literal["hidden", "kv"] = "hidden",
        sinks: int = 0,
    ) -> None:
        super().__init__()
        at_least_one(" slot" + NO_MEMORY, length=length, eval_length=eval_length)
        if clamp is not None and not relative:
            raise ValueError(f"clamp={clamp} limits relative distances; take relative=True, or clamp=None")
        if sinks and same_length:
            raise ValueError(f"sinks={sinks} lie outside the window of same_length=True; take one of the two")
        at_least_one("; 0 keeps none", least=0, sinks=sinks)
        self.sinks = sinks
        self.width, self.heads, self.relative, self.clamp, self.keep = width, heads, relative, clamp, keep
        if keep == "kv":
            self.needs = self.needs | {"stored_kv"}
        self.length, self.eval_length, self.same_length = length, eval_length or length, same_length

    def window(self) -> int | None:
        return self._slots() if self.same_length else None

    def position_scheme(self) -> Positions | None:
        return RelativePositions(self.heads, self.width // self.heads, clamp=self.clamp) if self.relative else None

    def _slots(self) -> int:
        return self.length if self.training else self.eval_length

    def init_state(self, batch_size: int, like: Tensor) -> Any:
        return self.beside_sinks(self.empty(self._slots(), batch_size, like), batch_size, like)

    def open(self, state: Any, first_B1P: Tensor | None, project_kv: ProjectKV | None) -> Any:
        assert project_kv is not None
        if isinstance(state, SinksState):
            state = placed(*state, first_B1P)
        k_BHME, v_BHME, clean = read_store(state, self, self.stored_heads[0], project_kv)
        return Context(k_BHME, v_BHME, state.positions_BMP, state.valid_BM, consecutive=True, clean=clean)

    def read(self, opened: Any, query: Query, project_kv: ProjectKV | None) -> Reading:
        return Reading(opened, carry=project_kv)


class CacheBeforeTokens(TransformerXL):
    """A Transformer-XL cache of `length` tokens before the `front` memory tokens, which see it if `read_by_all`."""

    def __init__(self, width: int, heads: int, length: int, *, front: int, read_by_all: bool) -> None:
        super().__init__(width, heads, length, relative=False)
        self.front, self.read_by_all = front, read_by_all

    def open(self, state: Rows | Pairs, first_B1P: Tensor | None, project_kv: ProjectKV | None) -> Context:
        context = super().open(state, first_B1P, project_kv)
        return context._replace(positions_BMP=context.positions_BMP - self.front, consecutive=False)

    def read(self, opened: Context, query: Query, project_kv: ProjectKV | None) -> Reading:
        if self.read_by_all or query.segment is None:
            return Reading(opened)
        start, length = query.segment
        place_L = torch.arange(query.x_BND.shape[1], device=query.x_BND.device)
        inside_L = (place_L >= start) & (place_L < start + length)
        return Reading(opened._replace(visible_BHNM=inside_L[:, None].expand(-1, opened.k_BHME.shape[2])[None, None]))
