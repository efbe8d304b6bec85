"""kNN-LM (Khandelwal, Levy, Jurafsky, Zettlemoyer, Lewis 2019, arXiv:1911.00172; github.com/urvashik/knnlm).

    datastore     {(f(c_i), w_i)}, all contexts of the training split
    d_i         = |f(x) - f(c_i)|^2
    p_kNN(y)    ~ sum_{i in the k nearest} 1[y = w_i] exp(-d_i / T)         (2)
    p(y)        = lambda p_kNN(y) + (1 - lambda) p_LM(y)                    (3)

f is the normed input of the last feed-forward, the best key of the paper. Distances are computed from the stored keys
with any index; distances of quantised codes lose most of the gain. The authors' code gives tokens that were
not retrieved a log-probability of -10,000, here minus infinity, which differs only for lambda = 1.

Legend: B rows, N tokens of a segment, K neighbours, D width of a key.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cached_transformers.checks import at_least_one, shares
from cached_transformers.state import State

from .datastore import Datastore
from .output_cache import FoundEntries, OutputCache, linear_gate


@dataclass(frozen=True)
class KNNLM(OutputCache):
    """The nearest contexts of a read-only datastore; there is no state.

    Cost per token, for S entries: S D multiply-adds for exact search, and k D for the distances.

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
        return str(self.datastore.about.get("key", "feed_forward"))

    @property
    def sharpness(self) -> float:  # type: ignore[override]
        return 0.0 if math.isinf(self.temperature) else 1 / self.temperature

    def find(self, state: State, h_BND: Tensor, next_BN: Tensor) -> FoundEntries:
        distance_QK, index_QK = self.datastore.nearest(h_BND.flatten(0, 1), self.k)
        score_QK = torch.where(index_QK >= 0, -distance_QK, -torch.inf)
        token_QK = self.datastore.values_S[index_QK.clamp(min=0).cpu()].to(h_BND.device, torch.long)
        return FoundEntries(score_QK.view(*h_BND.shape[:2], -1), token_QK.view(*h_BND.shape[:2], -1))

    def gate(self, lse_BN: Tensor, model_lse_BN: Tensor) -> tuple[Tensor, Tensor]:
        return linear_gate(lse_BN, self.lambda_)
