"""Attention Matching in closed form (Zweiger et al. 2026, arXiv:2602.16284; github.com/adamzweiger/compaction).

Of L keys and values M become slots, with biases and values that give reference queries the mass and output of all:

    z = q k^T / sqrt(E),  x = exp(z - max),  y = sum over the keys of x
    bias = log argmin over w in [low, high] of ||x_S w - y||^2
    values = argmin over c of ||softmax(z_S + bias) c - softmax(z) v||^2

Where queries are too few to determine the slots, these change least. Without bounds and a ridge, a slot of vanishing
weight gets a value of any size.

Legend: X any dimensions (rows and heads of keys), N queries, L keys, M slots, K = min(N, M), E head width, C channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def perhaps_any(flags: Tensor) -> bool:
    """Return False if no flag is set; a graph, a transform, and tensors without values do not tell."""
    unknown = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return unknown or flags.is_meta or bool(flags.any())


def solve(a_XNM: Tensor, y_XNC: Tensor, start_XMC: Tensor, ridge: float = 1e-3) -> Tensor:
    """(X, M, C): argmin over c of ||a c - y||^2 + ridge s^2 ||c - start||^2, s the largest singular value of a.

    Of equal ones the nearest to `start`; not a number where the system is not finite.
    """
    finite_X11 = a_XNM.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    u_XNK, s_XK, vh_XKM = torch.linalg.svd(torch.where(finite_X11, a_XNM, 0), full_matrices=False)
    top_X1 = s_XK[..., :1]
    real_XK = s_XK > top_X1 * torch.finfo(s_XK.dtype).eps * max(a_XNM.shape[-2:])
    inverse_XK = torch.where(real_XK, s_XK / (s_XK.square() + ridge * top_X1.square()), 0)
    return start_XMC + vh_XKM.mT @ (inverse_XK[..., None] * (u_XNK.mT @ (y_XNC - a_XNM @ start_XMC)))


def importance(z_XNL: Tensor, by: str, pool: int = 1) -> Tensor:
    """(X, L): root mean square ("rms"), "max" or "mean" over the queries of softmax(z), but for a factor, pooled."""
    norm = {"rms": 2, "max": math.inf, "mean": 1}[by]
    score_XL = torch.linalg.vector_norm(z_XNL.softmax(-1), norm, dim=-2)
    return F.avg_pool1d(score_XL.flatten(0, -2)[:, None], pool, 1, pool // 2).view_as(score_XL)


def pursue(z_XNL: Tensor, slots: int, keys: int = 1, interval: int = 1) -> Tensor:
    """(X, L) bool: orthogonal matching pursuit of the mass y, a choice of `slots` keys.

    A step adds the `keys` keys with the largest product with the missing mass; one of `interval` solves for weights.
    """
    lowest, rounds = math.exp(-7), 3  # so often keys of smaller weight leave the choice
    x_XNL = (z_XNL - z_XNL.amax(-1, keepdim=True)).exp()
    y_XN1 = x_XNL.sum(-1, keepdim=True)
    weight_XL1 = torch.zeros_like(x_XNL[..., 0, :, None])
    chosen_XL, steps = torch.zeros_like(weight_XL1[..., 0], dtype=torch.bool), -(-slots // keys)
    for _ in range(rounds + 1):
        for step in range(steps):
            product_XL = (x_XNL.mT @ (y_XN1 - x_XNL @ weight_XL1))[..., 0]
            product_XL = product_XL.masked_fill(chosen_XL | (x_XNL.amax(-2) == 0), -torch.inf)
            rank_XL = product_XL.argsort(dim=-1, descending=True, stable=True).argsort(-1)
            chosen_XL = chosen_XL | (rank_XL < (slots - chosen_XL.sum(-1, keepdim=True)).clamp(max=keys))
            if step % interval == 0 or step == steps - 1:
                weight_XL1 = solve(x_XNL * chosen_XL[..., None, :], y_XN1, torch.zeros_like(weight_XL1), 0)
                weight_XL1 = weight_XL1.clamp(1e-12, 1 / lowest).masked_fill(~chosen_XL[..., None], 0)
        found_XL, low_XL = chosen_XL, chosen_XL & (weight_XL1[..., 0] < lowest)
        if not perhaps_any(low_XL):
            break
        chosen_XL, weight_XL1 = chosen_XL & ~low_XL, weight_XL1.masked_fill(low_XL[..., None], 0)
    return found_XL


def match_mass(
    z_XNL: Tensor,
    z_XNM: Tensor,
    bias_XM: Tensor,
    bound: float = 3,
    steps: int = 2,
    ridge: float = 1e-3,
    power_M: Tensor | None = None,
) -> Tensor:
    """(X, M): biases from -bound to bound that give slots the mass of keys of logits z_XNL.

    z_XNM are the logits of slots with the biases that they had, bias_XM. Projected gradient steps follow clamped least
    squares; three power iterations from `power_M` give their length.
    """
    top_XN1 = torch.maximum(z_XNL.amax(-1, keepdim=True), z_XNM.amax(-1, keepdim=True))
    x_XNM, y_XN1 = (z_XNM - top_XN1).exp(), (z_XNL - top_XN1).exp().sum(-1, keepdim=True)
    one_XM1 = torch.ones_like(x_XNM[..., 0, :, None])
    low_XM1, high_XM1 = ((limit - bias_XM[..., None]).exp() for limit in (-bound, bound))
    weight_XM1 = solve(x_XNM, y_XN1, one_XM1, ridge).clamp(low_XM1, high_XM1)
    way_XM1 = one_XM1 if power_M is None else power_M[:, None]
    for _ in range(3):
        way_XM1 = F.normalize(x_XNM.mT @ (x_XNM @ way_XM1), dim=-2)
    size_X11 = (x_XNM @ way_XM1).square().sum(-2, keepdim=True).clamp(min=torch.finfo(z_XNL.dtype).tiny)
    for _ in range(steps):
        weight_XM1 = (weight_XM1 - x_XNM.mT @ (x_XNM @ weight_XM1 - y_XN1) / size_X11).clamp(low_XM1, high_XM1)
    return bias_XM + weight_XM1[..., 0].log()
