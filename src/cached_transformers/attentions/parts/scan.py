"""The causal scan of all mechanisms whose state is a matrix a head: sums of keys and values, with or without decay,
with or without the correction of the delta rule.

    S'_t = D_t S_{t-1}                                 D_t = diag(e^{g_t}), g_t <= 0: a number a head, or one a channel
    S_t  = S'_t + k_t v_t^T                            a sum
    S_t  = S'_t + beta_t k_t (v_t - S'_t^T k_t)^T      the delta rule: the error is that of the decayed state
    S_t  = S'_t + k_t (u_t - S'_t^T (e_t k_t))^T       the same with shares e of channels (arXiv:2605.22791)
    out_t = S_t^T q_t                                  after the token's own write

In chunks of C tokens (Yang et al. 2024, arXiv:2406.06484 and 2412.06464; arXiv:2510.26692 for channels), with S the
state before the chunk and e^{(j, i]} the decay after token j up to token i:

    P_ij = sum_d q_id k_jd e^{(j, i]_d}  for j <= i,      A_ij = beta_i sum_d k_id k_jd e^{(j, i]_d}  for j < i
    (I + A) [U, W] = diag(beta) [V, e^{(0, i]} K],        X = U - W S    (a sum: X = V)
    out = (e^{(0, i]} Q) S + P X,                         S <- e^{(0, C]} S + (e^{(j, C]} K)^T X
    shares of channels: e_id k_id instead of beta_i k_id, and V = U

P, A, U and W of all chunks are found at once; only S goes from one to the next.

No decay is made as a quotient, or as the exponential of a difference: with G the sum of g from the chunk's start,
e^{-G} leaves float32 within a few strong tokens, and G_i - G_j has lost the digits of short distances between i and j.
Every exponent here is a sum of the g between two tokens, each factor lies in [0, 1], and g = -inf forgets all. With one
g a head, these sums are a table of C x C. With one a channel, pairs of tokens are told apart by the boundary between
them: for two neighbouring blocks, the decay up to the boundary scales the keys before it, and the decay from there
on the queries after it, which leaves one product. Blocks of 1, 2, 4 .. C / 2 tokens hold each pair once.

Legend: B rows, H heads, N tokens, F features, V value width, G decays a head (1, or F), C tokens of a chunk; `...` any
leading dimensions (B, H and chunks).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .building_blocks import into_blocks, out_of_blocks

LEAST = -1e30
"""Finite replacement of -inf, so that 0 times it is 0."""


def causal_scan(
    q_BHNF: Tensor | None,
    k_BHNF: Tensor,
    v_BHNV: Tensor,
    state_BHFV: Tensor | None = None,
    *,
    beta_BHN1: Tensor | None = None,
    erase_BHNF: Tensor | None = None,
    log_decay_BHNG: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Outputs and the last S. Computed in float32 or wider; outputs have the dtype of the values.

    A normaliser is a column of ones in v. A token with k of 0 (or beta of 0) and g of 0 leaves the state as it is.

    Args:
        q_BHNF: None where only S is wanted; the outputs are then the values.
        state_BHFV: S before the first token; zeros when None.
        beta_BHN1: shares of the delta rule, for which beta |k|^2 must be at most 2; None for a sum.
        erase_BHNF: shares of the channels of keys, instead of beta; values are then u, written as they are.
        log_decay_BHNG: g, at most 0, of (B, H, N, 1) or (B, H, N, F); None for no decay.
        chunk: C, tokens of a chunk; rounded up to a power of two for decays of channels.

    Cost, in multiply-adds a head: N (C (F + V) + 2 F V) for a sum; N (C (2 F + V) + 3 F V) for the delta rule, and
    N C (F + V) / 2 for its triangular systems. With decays of channels, (C - 1) F / 2 instead of each C F, and
    F log2(C) exponentials a token.
    """
    dtype = torch.promote_types(v_BHNV.dtype, torch.float32)
    rows, heads, tokens, features = k_BHNF.shape
    if state_BHFV is None:
        state_BHFV = k_BHNF.new_zeros(rows, heads, features, v_BHNV.shape[-1], dtype=dtype)
    state = state_BHFV.to(dtype)
    if tokens == 0:
        return v_BHNV, state
    size = min(chunk, tokens)
    channels = log_decay_BHNG is not None and log_decay_BHNG.shape[-1] > 1
    if channels:
        size = 1 << (size - 1).bit_length()
    # What fills up the last chunk has beta 0, keys of 0 and g 0: it changes no state.
    k, v, *reads = (into_blocks(t.to(dtype), size) for t in (k_BHNF, v_BHNV, q_BHNF) if t is not None)
    share = beta_BHN1 if erase_BHNF is None else erase_BHNF
    share = None if share is None else into_blocks(share.to(dtype), size)
    reading, found, kept, whole = reads, k, k, None
    if log_decay_BHNG is None:
        g = None
    else:
        g = into_blocks(log_decay_BHNG.to(dtype), size)
        since = g.cumsum(-2).exp()
        reading, found, kept = [q * since for q in reads], k * since, k * _behind(g).exp()
        whole = since[..., -1:, :].mT
    if share is None:
        weights = _pairs(reads, k, g)
        out, state = _sums(weights, reading, kept, v, whole, state)
    else:
        *weights, lower = _pairs([*reads, k * share], k, g)
        wanted = torch.cat([v, found], -1) * share if erase_BHNF is None else torch.cat([v, found * share], -1)
        if size > 1:
            wanted = torch.linalg.solve_triangular(lower.tril(-1), wanted, upper=False, unitriangular=True)
        out, state = _corrections(weights, reading, kept, wanted, whole, state)
    return (v_BHNV if out is None else out_of_blocks(out, tokens).to(v_BHNV.dtype)), state


def _sums(
    weights: list[Tensor], reading: list[Tensor], kept: Tensor, v: Tensor, whole: Tensor | None, state: Tensor
) -> tuple[Tensor | None, Tensor]:
    written, before = kept.mT @ v, []
    # Unbound, not indexed: the gradient of an index is as long as the sequence.
    decays = () if whole is None else whole.unbind(2)
    for index, new in enumerate(written.unbind(2)):
        before.append(state)
        state = (state * decays[index] if decays else state) + new
    return (weights[0] @ v + reading[0] @ torch.stack(before, 2) if weights else None), state


def _corrections(
    weights: list[Tensor], reading: list[Tensor], kept: Tensor, wanted: Tensor, whole: Tensor | None, state: Tensor
) -> tuple[Tensor | None, Tensor]:
    u, w = wanted.split([state.shape[-1], kept.shape[-1]], -1)
    before, corrections = [], []
    decays = () if whole is None else whole.unbind(2)
    for index, (chunk_u, chunk_w, chunk_k) in enumerate(zip(u.unbind(2), w.unbind(2), kept.unbind(2), strict=True)):
        before.append(state)
        corrections.append(chunk_u - chunk_w @ state)
        state = (state * decays[index] if decays else state) + chunk_k.mT @ corrections[-1]
    if not weights:
        return None, state
    return weights[0] @ torch.stack(corrections, 2) + reading[0] @ torch.stack(before, 2), state


def _behind(g: Tensor) -> Tensor:
    """(..., C, G): the sum over later tokens of each token, 0 for the last one."""
    return F.pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


def _pairs(lefts: list[Tensor], k: Tensor, g: Tensor | None) -> list[Tensor]:
    """(..., C, C) of each: sum_d left_id k_jd e^{(j, i]_d} for j <= i, and 0 for j > i."""
    if g is None:
        return [(left @ k.mT).tril() for left in lefts]
    if g.shape[-1] == 1:
        # (..., C, C): e to the sum of g after token j up to token i; 0 where j > i
        below = torch.ones(g.shape[-2], g.shape[-2], dtype=g.dtype, device=g.device).tril(-1)
        lost = (g.clamp(min=LEAST) * below).cumsum(-2).exp().tril()
        return [(left @ k.mT) * lost for left in lefts]
    near = [(left * k).sum(-1)[..., None, None] for left in lefts]  # blocks of one token
    half, size = 1, k.shape[-2]
    while half < size:
        # (..., blocks, 2, half, F): the boundary of a block lies between its halves.
        early_g, late_g = g.unflatten(-2, (-1, 2, half)).unbind(-3)
        early = k.unflatten(-2, (-1, 2, half))[..., 0, :, :] * _behind(early_g).exp()
        late = late_g.cumsum(-2).exp()
        for index, left in enumerate(lefts):
            far = (left.unflatten(-2, (-1, 2, half))[..., 1, :, :] * late) @ early.mT
            first, second = near[index].unflatten(-3, (-1, 2)).unbind(-3)
            near[index] = torch.cat([F.pad(first, (0, half)), torch.cat([far, second], -1)], -2)
        half *= 2
    return [t.squeeze(-3) for t in near]
