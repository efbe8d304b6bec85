"""Base class of output caches: interpolate retrieved next-token counts with the model's distribution.

At each position a cache finds entries j with a score s_j and the token y_j that followed. With the model's p_vocab, or
its logits l, and a sharpness b:

    p_cache(w) = sum_j 1[w = y_j] softmax_j(b s_j)
    linear       p(w) = (1 - lambda) p_vocab(w) + lambda p_cache(w)
    joint        p(w) ~ exp(l_w) + sum_j 1[w = y_j] exp(b s_j + alpha)

The joint form is the linear one with lambda = sigmoid(alpha + lse_j b s_j - lse_w l_w) at each position. Where nothing
is found, lambda is 0.

Legend: B rows, N tokens of a segment, K entries, D width of a key, V vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from cached_transformers.layers.token_loss import IGNORED
from cached_transformers.models.inputs import check_targets
from cached_transformers.state import State


class FoundEntries(NamedTuple):
    """Entries found at each position: scores (minus infinity where there is none) and their tokens."""

    score_BNK: Tensor
    token_BNK: Tensor

    def weights(self, sharpness: float) -> tuple[Tensor, Tensor]:
        """Weights (B, N, K) of the entries, which sum to 1, or are 0 where nothing is found; and lse_j b s_j (B, N)."""
        absent_BNK = self.score_BNK == -torch.inf
        logits_BNK = (sharpness * self.score_BNK).masked_fill(absent_BNK, -torch.inf)  # 0 times infinity is NaN
        weight_BNK = logits_BNK.softmax(-1).masked_fill(absent_BNK.all(-1, keepdim=True), 0)
        return weight_BNK, logits_BNK.logsumexp(-1)


class MixedScores(NamedTuple):
    """Log-probabilities (B, N, V) of the next tokens in float32 or wider, and the state after the segment."""

    log_probabilities: Tensor
    state: State


class OutputCache:
    """Base class. Caches hold no parameters; everything that a text writes is in the state.

    Attributes:
        key: the hidden states that the cache reads, by their name in `hidden_states`.
        sharpness: b.
    """

    key: str = "last_hidden"
    sharpness: float

    def init_state(self, rows: int, like_BND: Tensor) -> State:
        """State of rows without observed tokens."""
        return ()

    def find(self, state: State, h_BND: Tensor, next_BN: Tensor) -> FoundEntries:
        """The entries of each position; a position never finds its own next token or a later one."""
        raise NotImplementedError("abstract: an output cache finds entries")

    def write(self, state: State, h_BND: Tensor, next_BN: Tensor) -> State:
        """The state once the next tokens are observed; tokens of -100 are not stored."""
        return state

    def gate(self, lse_BN: Tensor, model_lse_BN: Tensor) -> tuple[Tensor, Tensor]:
        """log lambda and log(1 - lambda), from the log-sum-exp of scaled scores and of the model's logits."""
        raise NotImplementedError("abstract: an output cache has a gate")

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
        wide_BNV = logits_BNV.to(torch.promote_types(logits_BNV.dtype, torch.float32))
        found = self.find(state, h_BND, next_BN)
        weight_BNK, lse_BN = found.weights(self.sharpness)
        log_cache_BN, log_model_BN = self.gate(lse_BN, wide_BNV.logsumexp(-1))
        logp_BNV = wide_BNV.log_softmax(-1)
        copied_BNV = torch.zeros_like(logp_BNV).scatter_add(2, found.token_BNK, weight_BNK.to(logp_BNV.dtype))
        mixed_BNV = torch.logaddexp(log_model_BN[..., None] + logp_BNV, log_cache_BN[..., None] + copied_BNV.log())
        return MixedScores(mixed_BNV, self.write(state, h_BND, next_BN))


def linear_gate(lse_BN: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """One lambda for all positions at which an entry is found."""
    found_BN = lse_BN != -torch.inf
    logs = (math.log(part) if part > 0 else -math.inf for part in (share, 1 - share))
    log_cache, log_model = (torch.full_like(lse_BN, log) for log in logs)
    return log_cache.masked_fill(~found_BN, -torch.inf), log_model.masked_fill(~found_BN, 0)


class OnlineCache:
    """Online use of an output cache: the token after a position is observed when the next token is read.

    `state` is the cache's state before the first segment, and later the state with all complete pairs.

    Example:
        >>> mix = OnlineCache(NeuralCache(size=500, theta=0.3, lambda_=0.1))
        >>> out = model(ids, output_hidden_states=True)   # a decoder of transformers, segment after segment
        >>> log_probabilities = mix(out.logits, out.hidden_states[-1], ids)
    """

    def __init__(self, cache: OutputCache, state: State | None = None) -> None:
        self.cache, self.state = cache, state
        self._last_B1D: Tensor | None = None

    @torch.no_grad()
    def __call__(self, logits_BNV: Tensor, h_BND: Tensor, tokens_BN: Tensor) -> Tensor:
        """Mixed log-probabilities (B, N, V) of the token after each of `tokens_BN`, the tokens that the model read."""
        if self.state is None:
            self.state = self.cache.init_state(len(h_BND), h_BND)
        if self._last_B1D is not None:
            self.state = self.cache.write(self.state, self._last_B1D, tokens_BN[:, :1])
        next_BN = torch.cat([tokens_BN[:, 1:], torch.full_like(tokens_BN[:, :1], IGNORED)], 1)
        out = self.cache(logits_BNV, h_BND, next_BN, self.state)
        self.state, self._last_B1D = out.state, h_BND[:, -1:].detach().clone()
        return out.log_probabilities
