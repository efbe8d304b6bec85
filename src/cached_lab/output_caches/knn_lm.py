"""kNN-LM (Khandelwal, Levy, Jurafsky, Zettlemoyer, Lewis 2019, arXiv:1911.00172; github.com/urvashik/knnlm).

    datastore     {(f(c_i), w_i)}, all contexts of the training split
    d_i         = |f(x) - f(c_i)|^2
    p_kNN(y)    ~ sum_{i in the k nearest} 1[y = w_i] exp(-d_i / T)         (2)
    p(y)        = lambda p_kNN(y) + (1 - lambda) p_LM(y)                    (3)

f is the normed input of the last feed-forward, the best key of the paper. The authors' code gives tokens that were not
retrieved a log-probability of -10,000, here minus infinity, which differs only for lambda = 1.

Legend: B rows, N tokens of a segment, S entries, C entries of a chunk, D width of a key, Q queries, K neighbours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cached_transformers.checks import at_least_one, shares
from cached_transformers.memories.parts.nearest import nearest
from cached_transformers.state import State

from .output_cache import FoundEntries, OutputCache

CHUNK = 2**27
"""Bytes of float32 keys that are compared at once."""


class Datastore:
    """The hidden states of all contexts of a text as keys (S, D), and the tokens that followed as values (S,).

    Args:
        keys_SD: float16 or float32. values_S: token ids.
        key: name of the hidden states in `hidden_states`.

    Raises:
        ValueError: no entry, or mismatched sizes.
    """

    def __init__(self, keys_SD: Tensor, values_S: Tensor, key: str = "feed_forward") -> None:
        if keys_SD.dim() != 2 or values_S.shape != keys_SD.shape[:1] or not keys_SD.numel():
            shapes = f"keys of shape {tuple(keys_SD.shape)} and values of shape {tuple(values_S.shape)}"
            raise ValueError(f"{shapes} must be (entries, width) and (entries,), with one entry at least")
        self.keys_SD, self.values_S, self.key = keys_SD, values_S, key

    def __len__(self) -> int:
        return len(self.values_S)

    @torch.no_grad()
    def nearest(self, q_QD: Tensor, neighbours: int) -> tuple[Tensor, Tensor]:
        """Squared distances (Q, K) in float32 and indices of the nearest keys, nearest first; K is at most S.

        Raises:
            ValueError: queries of another width.
        """
        if q_QD.shape[-1] != self.keys_SD.shape[1]:
            widths = f"hidden states of width {q_QD.shape[-1]} meet keys of width {self.keys_SD.shape[1]}"
            raise ValueError(f"{widths}; give {self.key} of the datastore's model")
        best_QK = torch.empty(len(q_QD), 0, device=q_QD.device)
        index_QK = torch.empty(len(q_QD), 0, dtype=torch.long, device=q_QD.device)
        with torch.autocast(q_QD.device.type, enabled=False):
            q_QD = q_QD.float()
            queries = torch.cat([q_QD, q_QD.new_ones(len(q_QD), 1)], 1)
            for number, k_CD in enumerate(self.keys_SD.split(size := max(CHUNK // (4 * q_QD.shape[1]), 1))):
                k_CD = k_CD.to(q_QD.device, torch.float32)
                # The nearest key has the largest q . k - |k|^2 / 2, a product with one more channel.
                keys = torch.cat([k_CD, -k_CD.square().sum(1, keepdim=True) / 2], 1)
                filled_B = torch.full((1,), len(k_CD), device=q_QD.device)
                found_QK = nearest(queries[None, None], keys[None, None], filled_B, min(neighbours, len(k_CD)))[0, 0]
                both_QK = torch.cat([best_QK, _distances(q_QD, k_CD, found_QK)], 1)
                best_QK, place_QK = both_QK.topk(min(neighbours, both_QK.shape[1]), largest=False)
                index_QK = torch.cat([index_QK, found_QK + number * size], 1).gather(1, place_QK)
        return best_QK, index_QK


def _distances(q_QD: Tensor, k_CD: Tensor, index_QK: Tensor) -> Tensor:
    """(Q, K) squared distances, from differences."""
    rows = max(CHUNK // max(4 * index_QK.shape[1] * q_QD.shape[1], 1), 1)
    pieces = zip(q_QD.split(rows), index_QK.split(rows), strict=True)
    return torch.cat([(q_RD[:, None] - k_CD[index_RK]).square().sum(-1) for q_RD, index_RK in pieces])


@dataclass(frozen=True)
class KNNLM(OutputCache):
    """The nearest contexts of a read-only datastore, by exact search; there is no state.

    Cost per token: S D multiply-adds for S entries.

    Args:
        datastore: keys and next tokens, written with the same model.
        k: neighbours; all entries where there are fewer. 1024 in the paper.
        temperature: T, in the units of squared distances; 1 in the paper.
        lambda_: share of the neighbours; 0.25 in the paper.

    Raises:
        ValueError: an option out of its range.
    """

    datastore: Datastore
    k: int = 1024
    temperature: float = 1.0
    lambda_: float = 0.25

    def __post_init__(self) -> None:
        at_least_one(k=self.k)
        shares(**{"lambda": self.lambda_})
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature} must be above 0; infinity weighs all neighbours alike")

    @property
    def key(self) -> str:  # type: ignore[override]
        return self.datastore.key

    @property
    def sharpness(self) -> float:  # type: ignore[override]
        return 0.0 if math.isinf(self.temperature) else 1 / self.temperature

    def find(self, state: State, h_BND: Tensor, next_BN: Tensor) -> FoundEntries:
        distance_QK, index_QK = self.datastore.nearest(h_BND.flatten(0, 1), self.k)
        token_QK = self.datastore.values_S[index_QK.cpu()].to(h_BND.device, torch.long)
        return FoundEntries(-distance_QK.view(*h_BND.shape[:2], -1), token_QK.view(*h_BND.shape[:2], -1))
