"""What a cache over outputs does with what it finds, whatever it looks in.

At each place of a segment a cache finds entries j, with a score s_j and the token y_j that followed there. With the
model's p_vocab, or its logits l, and a sharpness b:

    p_cache(w) = sum_j 1[w = y_j] softmax_j(b s_j)
    linear       p(w) = (1 - lambda) p_vocab(w) + lambda p_cache(w)
    joint        p(w) ~ exp(l_w) + sum_j 1[w = y_j] exp(b s_j + alpha)

The joint form is the linear one with a lambda of each place, sigmoid(alpha + lse_j b s_j - lse_w l_w), so there is one
way to mix. Entries of one token are added up before the logarithm. Where nothing is found, lambda is 0.

Legend: B rows, N tokens of a segment, K entries, D width of a key, V vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.models.inputs import check_targets
from cached_transformers.state import State


class Found(NamedTuple):
    """Entries that each place finds.

    Attributes:
        score_BNK: float32 or wider; minus infinity where there is no entry.
        token_BNK: long, in the vocabulary.
    """

    score_BNK: Tensor
    token_BNK: Tensor


class Copied(NamedTuple):
    """p_cache by entries: their weights, which sum to 1, or are 0 where nothing is found; lse_j b s_j."""

    weight_BNK: Tensor
    lse_BN: Tensor


class Gate(NamedTuple):
    """log lambda and log(1 - lambda) of each place."""

    log_cache_BN: Tensor
    log_model_BN: Tensor


class Mixed(NamedTuple):
    """Log-probabilities (B, N, V) of the next tokens in float32 or wider, and the state after the segment."""

    log_probabilities: Tensor
    state: State


class OutputCache:
    """Base of the caches. They hold no parameters, and all that a text leaves in them is in the state.

    Attributes:
        key: what they are to be given as hidden states, as `hidden_states` calls it.
    """

    key = "last_hidden"

    @property
    def sharpness(self) -> float:
        """b."""
        raise NotImplementedError("abstract: a cache says how it weighs scores")

    def init_state(self, rows: int, like_BND: Tensor) -> State:
        """State of rows that have observed nothing, for hidden states like these."""
        return ()

    def find(self, state: State, h_BND: Tensor, next_BN: Tensor) -> Found:
        """The entries of each place; none of a place knows its own next token, or a later one."""
        raise NotImplementedError("abstract: a cache finds entries")

    def write(self, state: State, h_BND: Tensor, next_BN: Tensor) -> State:
        """The state once the next tokens are observed; those that are -100 are not."""
        return state

    def gate(self, lse_BN: Tensor, of_model_BN: Tensor) -> Gate:
        """How much of it is mixed in.

        Args:
            lse_BN: of `Copied`. of_model_BN: log-sum-exp of the model's logits.
        """
        raise NotImplementedError("abstract: a cache says how much of it is mixed in")

    @torch.no_grad()
    def __call__(self, logits_BNV: Tensor, h_BND: Tensor, next_BN: Tensor, state: State | None = None) -> Mixed:
        """Mixed log-probabilities of one segment, and the state after it; without a gradient.

        Args:
            logits_BNV: logits or log-probabilities of the next tokens.
            h_BND: hidden states at the same places.
            next_BN: the tokens that then were observed, long; -100 where there is none, as at padding. They are what
                later places may copy: no place reads its own.
            state: after the last segment; None for rows that have observed nothing.

        Raises:
            ValueError: shapes that do not fit.
        """
        check_segment(logits_BNV, h_BND, next_BN)
        state = self.init_state(len(h_BND), h_BND) if state is None else state
        wide_BNV = logits_BNV.to(torch.promote_types(logits_BNV.dtype, torch.float32))
        found = self.find(state, h_BND, next_BN)
        copied = copied_from(found, self.sharpness)
        gate = self.gate(copied.lse_BN, wide_BNV.logsumexp(-1))
        mixed_BNV = mixed(wide_BNV.log_softmax(-1), copied.weight_BNK, found.token_BNK, gate)
        return Mixed(mixed_BNV, self.write(state, h_BND, next_BN))


def copied_from(found: Found, sharpness: float) -> Copied:
    """Weights of what was found."""
    absent_BNK = found.score_BNK == -torch.inf
    logits_BNK = (sharpness * found.score_BNK).masked_fill(absent_BNK, -torch.inf)  # 0 times infinity is no number
    weight_BNK = logits_BNK.softmax(-1).masked_fill(absent_BNK.all(-1, keepdim=True), 0)
    return Copied(weight_BNK, logits_BNK.logsumexp(-1))


def linear_gate(lse_BN: Tensor, share: float) -> Gate:
    """One lambda for all places at which something is found."""
    found_BN = lse_BN != -torch.inf
    logs = (math.log(part) if part > 0 else -math.inf for part in (share, 1 - share))
    log_cache, log_model = (torch.full_like(lse_BN, log) for log in logs)
    return Gate(log_cache.masked_fill(~found_BN, -torch.inf), log_model.masked_fill(~found_BN, 0))


def joint_gate(lse_BN: Tensor, alpha: float, of_model_BN: Tensor) -> Gate:
    """The lambda of each place by which entries compete with words in one softmax."""
    odds_BN = alpha + lse_BN - of_model_BN
    return Gate(F.logsigmoid(odds_BN), F.logsigmoid(-odds_BN))


def mixed(logp_BNV: Tensor, weight_BNK: Tensor, token_BNK: Tensor, gate: Gate) -> Tensor:
    """(B, N, V): log-probabilities of all words. B N (K + V) operations."""
    copied_BNV = torch.zeros_like(logp_BNV).scatter_add(2, token_BNK, weight_BNK.to(logp_BNV.dtype))
    return torch.logaddexp(gate.log_model_BN[..., None] + logp_BNV, gate.log_cache_BN[..., None] + copied_BNV.log())


def mixed_at(logp_BN: Tensor, copied_BN: Tensor, gate: Gate) -> Tensor:
    """(B, N): what `mixed` gives for one word a place, of its log-probability and of its share of p_cache."""
    return torch.logaddexp(gate.log_model_BN + logp_BN, gate.log_cache_BN + copied_BN.log())


def share_of(target_BN: Tensor, weight_BNK: Tensor, token_BNK: Tensor) -> Tensor:
    """(B, N): p_cache of the targets. B N K operations, whatever the vocabulary."""
    return (weight_BNK * (token_BNK == target_BN[..., None])).sum(-1)


def check_segment(logits_BNV: Tensor, h_BND: Tensor, next_BN: Tensor) -> None:
    """Refuse (ValueError) what is not of one segment, and tokens that the vocabulary has not."""
    if logits_BNV.dim() != 3 or h_BND.dim() != 3 or h_BND.shape[:2] != logits_BNV.shape[:2]:
        raise ValueError(
            f"logits of shape {tuple(logits_BNV.shape)} and hidden states of shape {tuple(h_BND.shape)} must be (rows, "
            "tokens, ...) of one segment"
        )
    check_targets(next_BN, logits_BNV[..., 0], logits_BNV.shape[-1], "the logits")
