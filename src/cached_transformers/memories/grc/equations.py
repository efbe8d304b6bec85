"""The equations of GRC attention (arXiv:2312.12742), first as the paper has them, then as they are computed.

`recall`, `mix` and `new_cache` are plain torch, for readers, and for tests to compare with. Beside them `gate_update`
is equations 3-5 with the weights of the three maps in one matrix, whose half for the cache is used once where all rows
share a cache; caches of each row take it as it is. `fused_gates.py` has the batch mean of it with a backward by hand.
`parts/memory_branch.py` computes equations 1 and 2.

Legend: B rows, N tokens, M slots, H heads, E head width, C cache width, F = C / H. Rows of the fused weights: update,
reset, candidate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from cached_transformers.memories.parts.gates import Gate, gated

Candidate = Literal["norm", "tanh", "affine"]
Norm = tuple[Tensor, Tensor, float] | None
Linear = Callable[[Tensor], Tensor]


def recall(q_BHNF: Tensor, k_BHMF: Tensor, v_BHMF: Tensor) -> Tensor:
    """Equation 1: o_mem, (B, H, N, F); q of the tokens' first C channels, k and v of the cache."""
    logits_BHNM = q_BHNF @ k_BHMF.mT / math.sqrt(q_BHNF.shape[-1])
    return torch.softmax(logits_BHNM, -1) @ v_BHMF


def mix(o_mem_BHNE: Tensor, o_self_BHNE: Tensor, lambda_H: Tensor) -> Tensor:
    """Equation 2, (B, H, N, E): each head has a ratio of its own. Of values that are narrower, the rest is 0."""
    ratio_H11 = torch.sigmoid(lambda_H)[:, None, None]
    return ratio_H11 * o_mem_BHNE + (1 - ratio_H11) * o_self_BHNE


def new_cache(s_BMC: Tensor, cache_BMC: Tensor, W_u: Linear, W_r: Linear, W_c: Linear) -> Tensor:
    """Equations 3-5: the cache of each row, (B, M, C), which Algorithm 1 then averages over the rows.

    Args:
        s_BMC: the first C channels of the tokens, interpolated to the slots.
        W_u, W_r, W_c: maps from 2 C to C channels; W_c with the candidate's norm where it has one.
    """
    update = torch.sigmoid(W_u(torch.cat([s_BMC, cache_BMC], -1)))
    reset = torch.sigmoid(W_r(torch.cat([s_BMC, cache_BMC], -1)))
    candidate = W_c(torch.cat([s_BMC, reset * cache_BMC], -1))
    return (1 - update) * cache_BMC + update * candidate


class GateWeights(NamedTuple):
    """Fused weights (3C, C) on the tokens, with bias (3C,), and on the cache; the candidate's LayerNorm or None."""

    tokens: Tensor
    bias: Tensor
    cache: Tensor
    norm: Norm


def candidate_of(z: Tensor, candidate: Candidate, norm: Norm) -> Tensor:
    """f(z): the identity, tanh, or LayerNorm(GELU(z))."""
    if candidate == "affine":
        return z
    if candidate == "tanh":
        return torch.tanh(z)
    assert norm is not None
    return F.layer_norm(F.gelu(z), z.shape[-1:], norm[0].to(z.dtype), norm[1].to(z.dtype), norm[2])


def gate_update(
    s_BMC: Tensor, cache: Tensor, weights: GateWeights, candidate: Candidate, *, update_gate: Gate = "sigmoid"
) -> Tensor:
    """`new_cache` with fused weights, (B, M, C), in the dtype of `cache`.

    Args:
        s_BMC: tokens, interpolated to the slots.
        cache: (M, C) shared by all rows, or (B, M, C).
        update_gate: of the update; "stretched" can be 0, see `gates.py`.
    """
    width = s_BMC.shape[-1]
    u, r, z = F.linear(s_BMC, weights.tokens, weights.bias).split(width, -1)
    held = cache.to(u.dtype)
    cu, cr = F.linear(held, weights.cache[: 2 * width]).split(width, -1)
    u, r = gated(u + cu, update_gate), torch.sigmoid(r + cr)
    c = candidate_of(z + F.linear(r * held, weights.cache[2 * width :]), candidate, weights.norm)
    return torch.lerp(cache.expand_as(c), c.to(cache.dtype), u.to(cache.dtype))
