"""kNN-LM (Khandelwal, Levy, Jurafsky, Zettlemoyer, Lewis 2019, arXiv:1911.00172; github.com/urvashik/knnlm).

A language model copies what followed the contexts of its training text that are nearest to its own:

    datastore     {(f(c_i), w_i)}, all contexts of the training split
    d_i         = |f(x) - f(c_i)|^2
    p_kNN(y)    ~ sum_{i in the k nearest} 1[y = w_i] exp(-d_i / T)         (2)
    p(y)        = lambda p_kNN(y) + (1 - lambda) p_LM(y)                    (3)

f is the input of the last feed-forward, after its norm; of the keys that the paper compares, it is the best. Distances
are always computed from the keys as they are stored, whatever index has found them: those of quantised codes cost most
of the gain. The authors' code gives a token that was not retrieved a log-probability of -10,000; here it is minus
infinity, which differs for lambda = 1 alone.

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
from .output_cache import Found, Gate, OutputCache, linear_gate


@dataclass(frozen=True)
class KNNLM(OutputCache):
    """The nearest contexts of a datastore, which reading changes nothing of: there is no state.

    Cost per token, for S entries: S D multiply-adds for exact search, and k D for the distances.

    Args:
        datastore: keys and what followed them, of the same model.
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
        at_least_one("; a model without neighbours takes none", k=self.k)
        shares(**{"lambda": self.lambda_})
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature} must be above 0; infinity weighs all neighbours alike")

    @property
    def key(self) -> str:  # type: ignore[override]
        """What the datastore's keys are."""
        return str(self.datastore.about.get("key", "feed_forward"))

    @property
    def sharpness(self) -> float:
        return 0.0 if math.isinf(self.temperature) else 1 / self.temperature

    def find(self, state: State, h_BND: Tensor, next_BN: Tensor) -> Found:
        distance_QK, index_QK = self.datastore.nearest(h_BND.flatten(0, 1), self.k)
        score_QK = torch.where(index_QK >= 0, -distance_QK, -torch.inf)
        token_QK = self.datastore.values_S[index_QK.clamp(min=0).cpu()].to(h_BND.device, torch.long)
        return Found(score_QK.view(*h_BND.shape[:2], -1), token_QK.view(*h_BND.shape[:2], -1))

    def gate(self, lse_BN: Tensor, of_model_BN: Tensor) -> Gate:
        return linear_gate(lse_BN, self.lambda_)
