"""Memformer (Wu, Lan, Qian, Gu, Geramifard, Yu 2020, arXiv:2010.06891; no code of the authors for this form).

Every block reads M slots by cross-attention. After the last layer each slot is rewritten by an attention that sees
the slot itself and the segment's tokens, sharpened by a temperature, and then forgets a little.

    read    x <- x + attention(x; slots)
    write   a_i = softmax((m_i W_q) [m_i W_k; x W_k]^T / (sqrt(E) tau)),   n_i = a_i [m_i; x W_v]
    forget  m_i' = (n_i + b_i) / |n_i + b_i|,   at first m_i = b_i / |b_i|

Slots do not see each other, which would let them become one. `ReplayLoop` is the paper's way to train over many
segments with the activations of one.

Legend: B rows, N tokens, M slots, H heads, E head width, D = H * E model width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.memory import Entry, ModelMemory, Projections, Tokens, Trace
from cached_transformers.interfaces.probing import Probing, fixed
from cached_transformers.registry import MEMORIES

from .parts.memory_tokens import carried_norm
from .parts.options import NO_MEMORY, check_heads, check_positive
from .parts.recurrent import shown, wrote


class MemorySlots(NamedTuple):
    """The slots, and how many segments the row has seen; before the first one the slots are those at the start."""

    slots_BMD: Tensor
    segments_B: Tensor


class SlotAttention(nn.Module):
    """Residual cross-attention of the tokens over the slots of a model memory ("sublayer" insertion)."""

    def __init__(self, width: int, heads: int, *, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, width, bias=bias)

    def forward(self, x_BND: Tensor, slots_BMD: Tensor, valid_BM: Tensor | None = None) -> Tensor:
        """Read of the valid slots (all when None); zeros for a row without any."""
        return self.read(x_BND, *self.open(slots_BMD, valid_BM))

    def _heads(self, t_BND: Tensor) -> Tensor:
        return t_BND.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def open(self, slots_BMD: Tensor, valid_BM: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values (B, H, M, E) of the slots, and which are valid."""
        if valid_BM is not None:
            slots_BMD = torch.where(valid_BM[..., None], slots_BMD, 0)  # a NaN would survive a mask on the logits
        k, v = self.key_value(slots_BMD).chunk(2, -1)
        return self._heads(k), self._heads(v), valid_BM

    def read(self, x_BND: Tensor, *opened: Any) -> Tensor:
        """`forward`, of what `open` gave."""
        k_BHME, v_BHME, valid_BM = opened
        mask = None if valid_BM is None else valid_BM[:, None, None]
        q_BHNE = self._heads(self.query(self.norm(x_BND)))
        out = F.scaled_dot_product_attention(q_BHNE, k_BHME, v_BHME, attn_mask=mask)
        y_BND = self.output(out.transpose(1, 2).flatten(2))
        return y_BND if valid_BM is None else torch.where(valid_BM.any(1)[:, None, None], y_BND, 0)


def write_slots(
    slots_BHME: Tensor,
    q_BHME: Tensor,
    slot_k_BHME: Tensor,
    k_BHNE: Tensor,
    v_BHNE: Tensor,
    temperature: float,
    padding_BN: Tensor | None = None,
) -> Tensor:
    """Attention of each slot to itself and the tokens, (B, H, M, E); a slot's value for itself is the slot."""
    scale = 1 / (math.sqrt(q_BHME.shape[-1]) * temperature)
    itself_BHM1 = (q_BHME * slot_k_BHME).sum(-1, keepdim=True)
    tokens_BHMN = q_BHME @ k_BHNE.mT
    if padding_BN is not None:
        tokens_BHMN = tokens_BHMN.masked_fill(padding_BN[:, None, None], -torch.inf)
    itself_BHM1, tokens_BHMN = (
        (scale * torch.cat([itself_BHM1, tokens_BHMN], -1)).softmax(-1).split([1, k_BHNE.shape[2]], -1)
    )
    return itself_BHM1 * slots_BHME + tokens_BHMN @ v_BHNE


@MEMORIES.register(
    "memformer",
    paper="arXiv:2010.06891",
    title="Memformer",
    carries="slots that every layer reads, rewritten after each segment",
    purpose="a state of fixed size, written by what training needs",
    equations="blocks attend the slots; slot' = normalise(softmax(slot and tokens / tau) values + b)",
    state="per row: 4 M D + 8 bytes",
    cost="per token: 2 D^2 (1 + M / N) + 2 M D a layer (read), 2 D^2 (1 + M / N) + 2 M D once (write) multiply-adds",
    reach="unbounded; what fits into M slots",
    gradient="through the slots, over `bptt` segments",
    probe=Probing(fixed(length=2, temperature=0.5), learning_rate=1e-3),
)
class Memformer(ModelMemory):
    """Slots that every block attends, each rewritten after a segment from itself and the segment's tokens.

    The cross-attention is between attention and feed-forward, with a residual connection and a norm before it.
    A row of nothing but padding keeps its slots.

    Args:
        width: D. heads: H, also of the write.
        length: M, slots.
        temperature: tau of the write; below 1 a slot takes few things at a time.
        forgetting: length of the biases b at the start of training; slots are drawn to where they point.
        norm: "pre" or "post", where the model's norms are (models say it themselves); with "pre" written slots pass
            through a LayerNorm of the memory first.
    """

    needs = frozenset({"state", "slots"})

    def __init__(
        self,
        width: int,
        heads: int,
        length: int = 32,
        *,
        temperature: float = 0.25,
        forgetting: float = 0.2,
        norm: str = "pre",
    ) -> None:
        super().__init__()
        at_least_one(" slot" + NO_MEMORY, length=length)
        check_positive(temperature=temperature, forgetting=forgetting)
        check_heads(width, heads)
        self.width, self.heads, self.length, self.temperature = width, heads, length, temperature
        self.norm = carried_norm(norm, width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        for linear in (self.query, self.key):
            nn.init.xavier_uniform_(linear.weight)
        # Values about as long as slots: longer ones would wipe a slot out before it has learnt what to keep.
        nn.init.xavier_uniform_(self.value.weight, gain=width**-0.5)
        self.bias_MD = nn.Parameter(forgetting * F.normalize(torch.randn(length, width), dim=-1))

    def init_state(self, batch_size: int, like: Tensor) -> MemorySlots:
        segments_B = torch.zeros(batch_size, dtype=torch.long, device=like.device)
        return MemorySlots(like.new_zeros(batch_size, self.length, self.width), segments_B)

    def _slots(self, state: MemorySlots) -> Tensor:
        # Those at the start are recomputed, so that a fresh state is no part of the graph, and never outdated.
        return torch.where(state.segments_B[:, None, None] > 0, state.slots_BMD, F.normalize(self.bias_MD, dim=-1))

    def _heads(self, t_BND: Tensor) -> Tensor:
        return t_BND.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def slot_attention(self, index: int) -> SlotAttention:
        return SlotAttention(self.width, self.heads)

    def open(self, state: MemorySlots, tokens: Tokens, layers: Sequence[Projections]) -> tuple[Tensor]:
        return (self._slots(state),)

    def enter(self, opened: tuple[Tensor], tokens: Tokens) -> Entry:
        return Entry(tokens, slots=opened)

    def exit(self, state: MemorySlots, x_BND: Tensor, traces: Sequence[Trace]) -> tuple[Tensor, MemorySlots, None]:
        padding_BN = traces[0].query.padding_BN
        before_BMD = self._slots(state)
        after_BMD = self.write(before_BMD, self.norm(shown(x_BND, padding_BN)), padding_BN).to(before_BMD.dtype)
        wrote_B = wrote(padding_BN, x_BND)
        slots_BMD = torch.where(wrote_B[:, None, None], after_BMD, state.slots_BMD)
        return x_BND, MemorySlots(slots_BMD, state.segments_B + wrote_B), None

    def write(self, slots_BMD: Tensor, x_BND: Tensor, padding_BN: Tensor | None = None) -> Tensor:
        """(B, M, D): the slots after the tokens x, whose padding is marked with True."""
        made_BHME = write_slots(
            self._heads(slots_BMD),
            self._heads(self.query(slots_BMD)),
            self._heads(self.key(slots_BMD)),
            self._heads(self.key(x_BND)),
            self._heads(self.value(x_BND)),
            self.temperature,
            padding_BN,
        )
        # Each slot is drawn towards the direction of its bias and brought to unit length.
        return F.normalize(made_BHME.transpose(1, 2).flatten(2) + self.bias_MD, dim=-1)
