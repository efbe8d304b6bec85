"""The continuous cache of Grave, Joulin, Usunier 2016 (arXiv:1612.04426).

    cache of M pairs  {(h_i, x_{i+1}) | t - M <= i < t}, for h_t that predicts x_{t+1}
    p_cache(w)  ~ sum_i 1[w = x_{i+1}] exp(theta h_t . h_i)                                     (3)
    p(w)        = (1 - lambda) p_vocab(w) + lambda p_cache(w)

Each position sees the M pairs before it, including pairs of its own segment, so segment boundaries change nothing. As
in the paper, and unlike the pointer of awd-lstm-lm, a cache is used from its first pair on.

Legend: B rows, N tokens of a segment, M pairs of the cache, K = M + N, D width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cached_transformers.checks import at_least_one, shares
from cached_transformers.layers.token_loss import IGNORED
from cached_transformers.memories.memorizing import NeighbourStore, store
from cached_transformers.state import State

from .output_cache import FoundEntries, OutputCache


@dataclass(frozen=True)
class NeuralCache(OutputCache):
    """The last M hidden states of each row with the tokens that followed.

    State per row: M (D e + 8) + 8 bytes, e bytes a number of the hidden states: the ring buffer of `memorizing` with
    one head, tokens as values. Cost per token: (M + N) D multiply-adds.

    Args:
        size: M; 100 to 10,000 in the paper.
        theta: scale of the dot products; 0 weighs all pairs alike. Its best value depends on the norm of the model's
            hidden states.
        lambda_: share of the cache.

    Raises:
        ValueError: an option out of its range.
    """

    size: int = 2000
    theta: float = 0.3
    lambda_: float = 0.1

    def __post_init__(self) -> None:
        at_least_one(size=self.size)
        shares(**{"lambda": self.lambda_})
        if not (math.isfinite(self.theta) and self.theta >= 0):
            raise ValueError(f"theta={self.theta} must be a number from 0 on; 0 weighs all pairs alike")

    @property
    def sharpness(self) -> float:  # type: ignore[override]
        return self.theta

    def init_state(self, rows: int, like_BND: Tensor) -> NeighbourStore:
        keys = like_BND.new_zeros(rows, 1, self.size, like_BND.shape[-1])
        tokens = torch.zeros(rows, 1, self.size, 1, dtype=torch.long, device=like_BND.device)
        return NeighbourStore(keys, tokens, torch.zeros(rows, dtype=torch.long, device=like_BND.device))

    def find(self, state: State, h_BND: Tensor, next_BN: Tensor) -> FoundEntries:
        ring: NeighbourStore = state  # type: ignore[assignment]
        new_BN = observed(h_BND, next_BN)
        count_BN = ring.written_B[:, None] + new_BN.cumsum(1) - new_BN.long()  # pairs written before each position
        last_B1 = ring.written_B[:, None] - 1
        slot_M = torch.arange(self.size, device=h_BND.device)
        number_BM = last_B1 - (last_B1 - slot_M) % self.size  # number of the pair in each slot; below 0 for none
        number_BN = torch.where(new_BN, count_BN, -1)
        number_B1K = torch.cat([number_BM, number_BN], 1)[:, None]
        count_BN1 = count_BN[..., None]
        seen_BNK = (number_B1K >= 0) & (number_B1K < count_BN1) & (number_B1K >= count_BN1 - self.size)
        wide = torch.promote_types(h_BND.dtype, torch.float32)
        with torch.autocast(h_BND.device.type, enabled=False):  # exponents need float32
            h_BND = h_BND.to(wide)
            keys_BKD = torch.cat([ring.k_BHME[:, 0].to(wide), h_BND], 1)
            score_BNK = (h_BND @ keys_BKD.mT).masked_fill(~seen_BNK, -torch.inf)
        token_B1K = torch.cat([ring.v_BHME[:, 0, :, 0], next_BN.clamp(min=0)], 1)[:, None]
        return FoundEntries(score_BNK, token_B1K.expand(-1, h_BND.shape[1], -1))

    def write(self, state: State, h_BND: Tensor, next_BN: Tensor) -> NeighbourStore:
        ring: NeighbourStore = state  # type: ignore[assignment]
        return store(ring, h_BND[:, None], next_BN[:, None, :, None], ~observed(h_BND, next_BN))


def observed(h_BND: Tensor, next_BN: Tensor) -> Tensor:
    """(B, N) bool: positions whose pair is stored: they have a next token and a finite hidden state."""
    return (next_BN != IGNORED) & h_BND.isfinite().all(-1)
