"""Three small memories, one for each place that GRC does not use; read them before you write your own.

They are registered when this file is imported, that is, only in the tests.

Legend: B rows, N tokens, M slots, L = M + N, D model width, P position channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.interfaces.memory import (
    Context,
    Entry,
    LayerMemory,
    ModelMemory,
    ProjectKV,
    Query,
    Reading,
    Tokens,
    Trace,
)
from cached_transformers.memories.memformer import SlotAttention
from cached_transformers.registry import MEMORIES


class WindowState(NamedTuple):
    """The last M hidden states, newest last, their positions, and how many of them are real."""

    x_BMD: Tensor
    positions_BMP: Tensor
    count_B: Tensor


@MEMORIES.register("example_window", paper="arXiv:1901.02860", exact_when="length >= tokens seen")
class ExampleWindow(LayerMemory):
    """Each layer attends the last M inputs that it saw in earlier segments ("context").

    State: M (4 D + 8) + 8 bytes per row and layer.
    """

    needs = frozenset({"state", "context"})

    def __init__(self, width: int, heads: int, length: int = 8) -> None:
        super().__init__()
        self.width, self.length = width, length

    def init_state(self, batch_size: int, like: Tensor) -> WindowState:
        count_B = torch.zeros(batch_size, dtype=torch.long, device=like.device)
        positions_BMP = count_B.new_zeros(batch_size, self.length, 1)
        return WindowState(like.new_zeros(batch_size, self.length, self.width), positions_BMP, count_B)

    def read(self, state: WindowState, query: Query, project_kv: ProjectKV | None) -> Reading:
        assert project_kv is not None
        valid_BM = self._valid(state)
        k_BHME, v_BHME = project_kv(torch.where(valid_BM[..., None], state.x_BMD, 0))
        return Reading(Context(k_BHME, v_BHME, state.positions_BMP, valid_BM))

    def write(self, state: WindowState, trace: Trace) -> tuple[WindowState, None]:
        x_BND, query = trace.x_BND, trace.query
        assert query.positions_BNP is not None
        written_BN = torch.ones_like(x_BND[..., 0], dtype=torch.bool) if query.padding_BN is None else ~query.padding_BN
        valid_BL = torch.cat([self._valid(state), written_BN], 1)
        # What is real comes last, in its order; what is not is cleared.
        order_BM1 = valid_BL.to(torch.uint8).argsort(dim=1, stable=True)[:, -self.length :, None]
        real_BM1 = valid_BL[..., None].gather(1, order_BM1)
        x_BLD = torch.cat([state.x_BMD, x_BND], 1)
        positions_BLP = torch.cat([state.positions_BMP, query.positions_BNP], 1)
        x_BMD = torch.where(real_BM1, x_BLD.gather(1, order_BM1.expand(-1, -1, self.width)), 0)
        positions_BMP = torch.where(real_BM1, positions_BLP.gather(1, order_BM1), 0)
        return WindowState(x_BMD, positions_BMP, real_BM1.sum((1, 2))), None

    def _valid(self, state: WindowState) -> Tensor:
        return torch.arange(self.length, device=state.count_B.device) >= self.length - state.count_B[:, None]


class TokensState(NamedTuple):
    """The outputs of the write tokens of the last segment, and how many segments the row has seen."""

    tokens_BMD: Tensor
    segments_B: Tensor


@MEMORIES.register("example_tokens", paper="arXiv:2207.06881")
class ExampleTokens(ModelMemory):
    """Memory tokens before the segment are read; the same number after it are written and carried ("tokens_round").

    State: 4 M D + 8 bytes per row.
    """

    needs = frozenset({"state", "tokens_round"})

    def __init__(self, width: int, heads: int, length: int = 3) -> None:
        super().__init__()
        self.length, self.extra_tokens = length, 2 * length
        self.write_MD = nn.Parameter(torch.randn(length, width) / width**0.5)

    def init_state(self, batch_size: int, like: Tensor) -> TokensState:
        segments_B = torch.zeros(batch_size, dtype=torch.long, device=like.device)
        return TokensState(like.new_zeros(batch_size, *self.write_MD.shape), segments_B)

    def enter(self, state: TokensState, tokens: Tokens) -> Entry:
        x_BND, positions_BNP, padding_BN = tokens[:3]
        empty_B1 = state.segments_B[:, None] == 0
        read_BMD = torch.where(empty_B1[..., None], 0, state.tokens_BMD)
        write_BMD = self.write_MD.expand_as(read_BMD)
        if padding_BN is None:
            padding_BN = torch.zeros_like(x_BND[..., 0], dtype=torch.bool)
        sides = (empty_B1.expand(-1, self.length), torch.zeros_like(empty_B1).expand(-1, self.length))
        first, last = (p.expand(-1, self.length, -1) for p in (positions_BNP[:, :1], positions_BNP[:, -1:]))
        return Entry(
            Tokens(
                torch.cat([read_BMD, x_BND, write_BMD], 1),
                torch.cat([first, positions_BNP, last], 1),
                torch.cat([sides[0], padding_BN, sides[1]], 1),
            )
        )

    def exit(self, state: TokensState, x_BND: Tensor, traces: Sequence[Trace]) -> tuple[Tensor, TokensState, None]:
        m = self.length
        padding = traces[0].query.padding_BN
        assert padding is not None
        wrote_B = ~padding[:, m:-m].all(1)
        tokens_BMD = torch.where(wrote_B[:, None, None], x_BND[:, -m:], state.tokens_BMD)
        return x_BND[:, m:-m], TokensState(tokens_BMD, state.segments_B + wrote_B), None


class SlotsState(NamedTuple):
    """The slots, and how many segments the row has seen; before the first one all slots are empty."""

    slots_BMD: Tensor
    segments_B: Tensor


@MEMORIES.register("example_slots", paper="arXiv:2010.06891")
class ExampleSlots(ModelMemory):
    """Slots that every block attends in a sublayer, and that in turn attend each segment's outputs ("slots").

    State: 4 M D + 8 bytes per row.
    """

    needs = frozenset({"state", "slots"})

    def __init__(self, width: int, heads: int, length: int = 3) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.start_MD = nn.Parameter(torch.randn(length, width) / width**0.5)
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * width)

    def init_state(self, batch_size: int, like: Tensor) -> SlotsState:
        segments_B = torch.zeros(batch_size, dtype=torch.long, device=like.device)
        return SlotsState(like.new_zeros(batch_size, *self.start_MD.shape), segments_B)

    def slot_attention(self, index: int) -> SlotAttention:
        return SlotAttention(self.width, self.heads)

    def enter(self, state: SlotsState, tokens: Tokens) -> Entry:
        valid_BM = (state.segments_B > 0)[:, None].expand(state.slots_BMD.shape[:2])
        return Entry(tokens, slots=(state.slots_BMD, valid_BM))

    def exit(self, state: SlotsState, x_BND: Tensor, traces: Sequence[Trace]) -> tuple[Tensor, SlotsState, None]:
        padding_BN = traces[0].query.padding_BN
        if padding_BN is None:
            padding_BN = torch.zeros_like(x_BND[..., 0], dtype=torch.bool)
        before_BMD = torch.where(state.segments_B[:, None, None] > 0, state.slots_BMD, self.start_MD)
        k_BND, v_BND = self.key_value(x_BND).chunk(2, -1)
        mask = ~padding_BN[:, None]
        news_BMD = F.scaled_dot_product_attention(self.query(before_BMD), k_BND, v_BND, attn_mask=mask)
        slots_BMD = F.layer_norm(before_BMD + news_BMD, news_BMD.shape[-1:])
        wrote_B = ~padding_BN.all(1)
        slots_BMD = torch.where(wrote_B[:, None, None], slots_BMD, state.slots_BMD)
        return x_BND, SlotsState(slots_BMD, state.segments_B + wrote_B), None
