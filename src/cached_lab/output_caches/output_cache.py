"""Base class of output caches: interpolate retrieved next-token counts with the model's distribution.

At each position a cache finds entries j with a score s_j and the token y_j that followed. With the model's p_vocab and
a sharpness b:

    p_cache(w) = sum_j 1[w = y_j] softmax_j(b s_j)
    p(w)       = (1 - lambda) p_vocab(w) + lambda p_cache(w)

Where nothing is found, lambda is 0.

Legend: B rows, N tokens of a segment, K entries, D width of a key, V vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cached_transformers.models.inputs import check_targets
from cached_transformers.state import State


class FoundEntries(NamedTuple):
    """Entries found at each position: scores (minus infinity where there is none) and their tokens."""

    score_BNK: Tensor
    token_BNK: Tensor

    def weights(self, sharpness: float) -> Tensor:
        """Weights (B, N, K) of the entries, which sum to 1, or are 0 where nothing is found."""
        absent_BNK = self.score_BNK == -torch.inf
        logits_BNK = (sharpness * self.score_BNK).masked_fill(absent_BNK, -torch.inf)  # 0 times infinity is NaN
        return logits_BNK.softmax(-1).masked_fill(absent_BNK.all(-1, keepdim=True), 0)

    def mixed(self, logp: Tensor, copied: Tensor, share: float) -> Tensor:
        """Log-probabilities of the mixture; `logp` of the model and `copied` of the cache are (B, N) or (B, N, V)."""
        found_BN = (self.score_BNK != -torch.inf).any(-1)
        if logp.dim() == 3:
            found_BN = found_BN[..., None]
        log_cache, log_model = (math.log(part) if part > 0 else -math.inf for part in (share, 1 - share))
        return torch.where(found_BN, torch.logaddexp(log_model + logp, log_cache + copied.log()), logp)


class MixedScores(NamedTuple):
    """Log-probabilities (B, N, V) of the next tokens in float32 or wider, and the state after the segment."""

    log_probabilities: Tensor
    state: State


class OutputCache:
    """Base class. Caches hold no parameters; everything that a text writes is in the state.

    Attributes:
        key: the hidden states that the cache reads, by their name in `hidden_states`.
        sharpness: b. lambda_: share of the cache.
    """

    key: str = "last_hidden"
    sharpness: float
    lambda_: float

    def init_state(self, rows: int, like_BND: Tensor) -> State:
        """State of rows without observed tokens."""
        return ()

    def find(self, state: State, h_BND: Tensor, next_BN: Tensor) -> FoundEntries:
        """The entries of each position; a position never finds its own next token or a later one."""
        raise NotImplementedError("abstract: an output cache finds entries")

    def write(self, state: State, h_BND: Tensor, next_BN: Tensor) -> State:
        """The state once the next tokens are observed; tokens of -100 are not stored."""
        return state

    @torch.no_grad()
    def __call__(self, logits_BNV: Tensor, h_BND: Tensor, next_BN: Tensor, state: State | None = None) -> MixedScores:
        """Mixed log-probabilities of one segment and the state after it, without a gradient.

        Args:
            logits_BNV: logits or log-probabilities of the next tokens. h_BND: hidden states at the same positions.
            next_BN: the observed next tokens, long; -100 for none. Later positions may copy them.
            state: after the last segment; None for rows without observed tokens.

        Raises:
            ValueError: mismatched shapes, or tokens outside the vocabulary.
        """
        if logits_BNV.dim() != 3 or h_BND.dim() != 3 or h_BND.shape[:2] != logits_BNV.shape[:2]:
            shapes = f"logits of shape {tuple(logits_BNV.shape)} and hidden states of shape {tuple(h_BND.shape)}"
            raise ValueError(f"{shapes} must be (rows, tokens, ...) of one segment")
        check_targets(next_BN, logits_BNV[..., 0], logits_BNV.shape[-1], "the logits")
        state = self.init_state(len(h_BND), h_BND) if state is None else state
        found = self.find(state, h_BND, next_BN)
        logp_BNV = logits_BNV.to(torch.promote_types(logits_BNV.dtype, torch.float32)).log_softmax(-1)
        weight_BNK = found.weights(self.sharpness).to(logp_BNV.dtype)
        copied_BNV = torch.zeros_like(logp_BNV).scatter_add(2, found.token_BNK, weight_BNK)
        mixed_BNV = found.mixed(logp_BNV, copied_BNV, self.lambda_)
        return MixedScores(mixed_BNV, self.write(state, h_BND, next_BN))
