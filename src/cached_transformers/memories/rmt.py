"""Recurrent Memory Transformer (Bulatov, Kuratov, Burtsev 2022, arXiv:2207.06881; github.com/booydar/LM-RMT).

The same vectors precede a segment, to be read, and follow it, to be written; the last layer's output of the
latter is the memory of the next segment, with gradient.

    X_t = [memory_t; segment_t; memory_t],   [., Y_t, memory_{t+1}] = transformer(X_t)
    bidirectional models: X_t = [memory_t; segment_t],   [memory_{t+1}, Y_t] = transformer(X_t)

With `slots`, the last S memories are kept, and the last of them asks them all (RMT-R, Kuratov et al. 2024,
arXiv:2402.10790; github.com/booydar/recurrent-memory-transformer), one head as wide as the model, each LN its own:

    P = [memory_{t-S+1}; ..; memory_t],    A = softmax(W_q LN(memory_t) (W_k LN(P))^T / sqrt(D))
    U = memory_t + W_o A W_v LN(P),        R_t = U + MLP(LN(U)),        X_t = [memory_t; R_t; segment_t; memory_t]

There, S has no end, a row's first segment reads its memory once, and R_t begins as a random map of the memories. Here
R_t begins as memory_t, since W_o and the last map of the MLP are 0, and is memory_t in a first segment.

Who sees whom in a causal model ("full"; "causal" makes both blocks of the memory triangular, one order for all):

    row \\ key   cache            read   segment   write
    read        if read_cache    all    -         -
    segment i   all              all    j <= i    -
    write       if read_cache    all    all       all

Legend: B rows, N tokens, M memory tokens, P = S M of S memories, C cached tokens, D model width, F width of the
feed-forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cached_transformers.attentions.parts.building_blocks import attend
from cached_transformers.checks import at_least_one
from cached_transformers.interfaces.memory import Entry, LayerMemory, ModelMemory, Projections, Tokens, Trace
from cached_transformers.interfaces.probing import Probing, fixed
from cached_transformers.registry import MEMORIES

from .parts.memory_tokens import carried_norm, check_tokens, surround, visible_round
from .parts.recurrent import wrote
from .transformer_xl import CacheBeforeTokens


class MemoryTokens(NamedTuple):
    """The last written tokens, after those of the memories before it; and how many segments the row has seen."""

    tokens_BMD: Tensor
    segments_B: Tensor


class Retrieval(nn.Module):
    """An attention of a memory over past ones, and a feed-forward: at first, both add 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query_norm, self.past_norm, self.norm = (nn.LayerNorm(width) for _ in range(3))
        self.query, self.value, self.output = (nn.Linear(width, width) for _ in range(3))
        self.key = nn.Linear(width, width, bias=False)  # a bias adds one number to all logits
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        for parameter in (*self.output.parameters(), *self.mlp[-1].parameters()):
            nn.init.zeros_(parameter)

    def forward(self, memory_BMD: Tensor, past_BPD: Tensor, seen_BP: Tensor) -> Tensor:
        q_BMD, past_BPD = self.query(self.query_norm(memory_BMD)), self.past_norm(past_BPD)
        found_BMD, _ = attend(q_BMD, self.key(past_BPD), self.value(past_BPD), seen_BP[:, None])
        u_BMD = memory_BMD + self.output(found_BMD)
        return u_BMD + self.mlp(self.norm(u_BMD))


@MEMORIES.register(
    "rmt",
    paper="arXiv:2207.06881",
    title="Recurrent Memory Transformer",
    carries="memory tokens, written after a segment and read before the next",
    purpose="a state of fixed size, written by what training needs",
    equations="[., Y_t, memory_{t+1}] = transformer([memory_t; segment_t; memory_t])",
    state="per row: 4 M D + 8 bytes, 4 S M D + 8 with slots; with a cache, per layer C (4 D + 8) + 8 bytes more",
    cost="per token and layer: 2 M / N (4 D^2 + 2 D F) + 4 D M (2 + 2 M / N) multiply-adds on top of the layer; with "
    "slots 3 M for 2 M, and once M / N (10 D^2 + 2 S D^2 + 2 S M D)",
    reach="unbounded; what fits into M vectors; with slots, into those of S segments",
    gradient="through the memory, over `bptt` segments; none into the cache",
    without={"bias": "mask='causal', and of a cache read_cache=True", "context": "cache=0"},
    probe=Probing(fixed(length=4)),
    presets={"trained": {"initial_carry": 0.1}},
)
class RMT(ModelMemory):
    """Memory tokens before the segment are read, as many after it are written and carried to the next one.

    Memory tokens have the positions right before and after the segment, which keeps its own; cached tokens move M
    positions back. In models with norms before the sublayers carried tokens pass through a LayerNorm of the memory,
    without which the residual stream would grow from segment to segment.

    Args:
        width: D. heads: H.
        length: M, memory tokens.
        mask: of a causal model: memory tokens see "full" their block, or in the "causal" order (no bias for the core).
        cache: C, tokens of a Transformer-XL memory in every layer; 0 for none.
        read_cache: whether memory tokens see the cache.
        initial_carry: ours, for a model that was trained without the memory, whose outputs are no embeddings: carry
            m_0 + g |m_0| y / |y| instead of the output y, m_0 the learned first token and g one learned number a token,
            this at first. `preset="trained"` is 0.1.
        slots: S, memories from which the last one retrieves; 0 for no retrieval.
        causal: whether the model is causal (models say it themselves); in others the memory is in front only, and its
            outputs there are carried.
        norm: "pre" or "post", where the model's norms are (models say it themselves).
    """

    needs = frozenset({"state", "tokens_round"})

    def __init__(
        self,
        width: int,
        heads: int,
        length: int = 10,
        *,
        mask: str = "full",
        cache: int = 0,
        read_cache: bool = False,
        slots: int = 0,
        initial_carry: float | None = None,
        causal: bool = True,
        norm: str = "pre",
    ) -> None:
        super().__init__()
        check_tokens(length, mask, cache)
        at_least_one("; 0 for no retrieval", least=0, slots=slots)
        if initial_carry is not None and not 0 <= initial_carry < math.inf:
            raise ValueError(f"initial_carry={initial_carry} must be at least 0 and finite; None carries outputs")
        if read_cache and not cache:
            raise ValueError("read_cache=True needs tokens to read; give cache=..., or take read_cache=False")
        self.width, self.heads, self.length, self.cache, self.read_cache = width, heads, length, cache, read_cache
        self.full, self.causal_model, self.behind = mask == "full", causal, length if causal else 0
        self.slots, self.front = max(slots, 1), length if slots == 0 else 2 * length
        self.extra_tokens = self.front + self.behind
        self.hides_cache = cache > 0 and not read_cache
        self.masks = (causal and self.full) or self.hides_cache
        self.needs |= ({"bias"} if self.masks else set()) | (CacheBeforeTokens.needs if cache else set())
        self.initial_MD = nn.Parameter(torch.randn(length, width) / width**0.5)
        self.norm = carried_norm(norm, width)
        self.carry_M = None if initial_carry is None else nn.Parameter(torch.full((length,), float(initial_carry)))
        self.retrieval = Retrieval(width) if slots else None

    def layer_memory(self, index: int) -> LayerMemory:
        if not self.cache:
            return LayerMemory()
        return CacheBeforeTokens(self.width, self.heads, self.cache, front=self.front, read_by_all=self.read_cache)

    def init_state(self, batch_size: int, like: Tensor) -> MemoryTokens:
        segments_B = torch.zeros(batch_size, dtype=torch.long, device=like.device)
        return MemoryTokens(like.new_zeros(batch_size, self.slots * self.length, self.width), segments_B)

    def open(self, state: MemoryTokens, tokens: Tokens, layers: Sequence[Projections]) -> Tensor:
        # Learned vectors until something was written: a fresh state is then no part of the graph, and never outdated.
        written_B11 = state.segments_B[:, None, None] > 0
        memory_BMD = torch.where(written_B11, state.tokens_BMD[:, -self.length :], self.initial_MD)
        if self.retrieval is None:
            return memory_BMD
        count = self.slots * self.length
        first_B1 = count - self.length * state.segments_B.clamp(1, self.slots)[:, None]
        seen_BP = torch.arange(count, device=first_B1.device) >= first_B1
        past_BPD = torch.where(seen_BP[..., None], state.tokens_BMD, 0)[:, : -self.length]
        found_BMD = self.retrieval(memory_BMD, torch.cat([past_BPD, memory_BMD], 1), seen_BP)
        return torch.cat([memory_BMD, torch.where(written_B11, found_BMD, memory_BMD)], 1)

    def advance(self, opened: Tensor | None, x_BND: Tensor, traces: Sequence[Trace]) -> None:
        return None  # tokens before the segment were read

    def enter(self, opened: Tensor | None, tokens: Tokens) -> Entry:
        if opened is None:
            return Entry(tokens)
        n, device = tokens.x_BND.shape[1], tokens.x_BND.device
        surrounded = surround(tokens, opened, opened[:, : self.length] if self.behind else None)
        return Entry(surrounded, segment=(self.front, n), visible_NN=self._visible(n, device))

    def _visible(self, n: int, device: torch.device) -> Tensor | None:
        """Attention mask."""
        if not self.masks:
            return None
        total = self.front + n + self.behind
        if not self.causal_model:
            return torch.ones(total, total, dtype=torch.bool, device=device)
        if self.full:
            return visible_round(self.front, n, self.length, device)
        return torch.ones(total, total, dtype=torch.bool, device=device).tril()

    def exit(self, state: MemoryTokens, x_BND: Tensor, traces: Sequence[Trace]) -> tuple[Tensor, MemoryTokens, None]:
        m, n = self.length, x_BND.shape[1] - self.extra_tokens
        written_BMD = self.norm(x_BND[:, -m:] if self.behind else x_BND[:, :m])
        if self.carry_M is not None:
            length_M1 = self.carry_M[:, None] * torch.linalg.vector_norm(self.initial_MD, dim=-1, keepdim=True)
            written_BMD = self.initial_MD + length_M1 * F.normalize(written_BMD, dim=-1)
        written_BMD = written_BMD.to(state.tokens_BMD.dtype)
        wrote_B = wrote(traces[0].query.narrow(self.front, n).padding_BN, x_BND)
        kept_BMD = torch.cat([state.tokens_BMD[:, m:], written_BMD], 1)
        tokens_BMD = torch.where(wrote_B[:, None, None], kept_BMD, state.tokens_BMD)
        return x_BND[:, self.front : self.front + n], MemoryTokens(tokens_BMD, state.segments_B + wrote_B), None
