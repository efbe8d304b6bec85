"""Attention Matching in closed form (Zweiger et al. 2026, arXiv:2602.16284; github.com/adamzweiger/compaction).

L keys and values become M: a choice of the keys, biases of their logits, and new values. For reference queries the slots
have the mass of the block, so that they fit beside other keys, and its output:

    z = q k^T / sqrt(E),  x = exp(z - max),  y = sum over the keys of x
    bias = log argmin over w in [low, high] of ||x_S w - y||^2
    values = argmin over c of ||softmax(z_S + bias) c - softmax(z) v||^2

Without a low bound a slot of weight 0 would have any value. Where queries are too few to determine the slots, the kept
keys and values change least, so that a choice of all keys changes nothing.

Legend: X any dimensions (rows and heads of keys), N queries, L keys, M slots, E head width, C channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

LOWEST = math.exp(-7)
"""Keys of a smaller weight leave the choice of `pursue`, whose weights are at most 1 / LOWEST."""
ROUNDS = 3
"""Number of times that `pursue` replaces keys."""


def perhaps_any(flags: Tensor) -> bool:
    """Return False if no flag is set; a graph, and tensors without values, do not tell."""
    return torch.compiler.is_compiling() or flags.is_meta or bool(flags.any())


def solve(a_XNM: Tensor, y_XNC: Tensor, start_XMC: Tensor, ridge: float = 0.0) -> Tensor:
    """(X, M, C): argmin over c of ||a c - y||^2 + ridge s^2 ||c - start||^2, s the largest singular value of a.

    Of equal ones the nearest to `start`; not a number where the system is not finite.
    """
    finite_X11 = a_XNM.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    u_XNK, s_XK, vh_XKM = torch.linalg.svd(torch.where(finite_X11, a_XNM, 0), full_matrices=False)
    top_X1 = s_XK[..., :1]
    real_XK = s_XK > top_X1 * torch.finfo(s_XK.dtype).eps * max(a_XNM.shape[-2:])
    inverse_XK = torch.where(real_XK, s_XK / (s_XK.square() + ridge * top_X1.square()), 0)
    change_XMC = vh_XKM.mT @ (inverse_XK[..., None] * (u_XNK.mT @ (y_XNC - a_XNM @ start_XMC)))
    return start_XMC + change_XMC


def importance(z_XNL: Tensor, by: str, pool: int = 1) -> Tensor:
    """(X, L): root mean square, maximum or mean over the queries of the weights softmax(z).

    Args:
        by: "rms", "max" or "mean".
        pool: width of an average over neighbouring keys, odd; places without a key count as 0.
    """
    weight_XNL = z_XNL.softmax(-1)
    if by == "rms":
        score_XL = weight_XNL.square().mean(-2).sqrt()
    else:
        score_XL = weight_XNL.amax(-2) if by == "max" else weight_XNL.mean(-2)
    pooled_XL = F.avg_pool1d(score_XL.flatten(0, -2)[:, None], pool, 1, pool // 2)
    return pooled_XL.view_as(score_XL)


def pursue(z_XNL: Tensor, slots: int, keys: int = 1, interval: int = 1) -> Tensor:
    """(X, L) bool: orthogonal matching pursuit of the mass y, a choice of `slots` keys.

    Each step adds the `keys` keys that have the largest product with what is missing of y; weights are solved in every
    step of `interval`, and in the last one. Keys of vanishing weight are replaced.
    """
    x_XNL = (z_XNL - z_XNL.amax(-1, keepdim=True)).exp()
    y_XN1 = x_XNL.sum(-1, keepdim=True)
    chosen_XL = torch.zeros_like(x_XNL[..., 0, :], dtype=torch.bool)
    weight_XL = torch.zeros_like(x_XNL[..., 0, :])
    steps = -(-slots // keys)
    for again in range(ROUNDS + 1):
        for step in range(steps):
            missing_XNL = y_XN1 - x_XNL @ weight_XL[..., None]
            product_XL = (x_XNL.mT @ missing_XNL)[..., 0].masked_fill(chosen_XL | (x_XNL.amax(-2) == 0), -torch.inf)
            rank_XL = product_XL.argsort(dim=-1, descending=True, stable=True).argsort(-1)
            chosen_XL = chosen_XL | (rank_XL < (slots - chosen_XL.sum(-1, keepdim=True)).clamp(max=keys))
            if step % interval == 0 or step == steps - 1:
                index_XM = chosen_XL.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :slots]
                real_XM = chosen_XL.gather(-1, index_XM)
                x_XNM = torch.where(real_XM[..., None, :], x_XNL.take_along_dim(index_XM[..., None, :], -1), 0)
                found_XM = solve(x_XNM, y_XN1, torch.zeros_like(x_XNM[..., 0, :, None]))[..., 0]
                found_XM = found_XM.clamp(1e-12, 1 / LOWEST).masked_fill(~real_XM, 0)
                weight_XL = weight_XL.scatter(-1, index_XM, found_XM)
        dropped_XL = chosen_XL & (weight_XL < LOWEST)
        if again == ROUNDS or not perhaps_any(dropped_XL):
            break
        chosen_XL, weight_XL = chosen_XL & ~dropped_XL, weight_XL.masked_fill(dropped_XL, 0)
    return chosen_XL


def match_mass(
    z_XNL: Tensor,
    z_XNM: Tensor,
    *,
    bound: tuple[float, float],
    steps: int = 0,
    ridge: float = 0.0,
    power_start_M: Tensor | None = None,
) -> Tensor:
    """(X, M): biases, to be added to the logits of the slots, with which they have the mass of all keys.

    Args:
        z_XNL: logits of the keys; minus infinity for keys outside of the block. z_XNM: of the slots.
        bound: smallest and largest bias.
        steps: projected gradient steps after the clamped least squares.
        ridge: pulls towards bias 0, see `solve`.
        power_start_M: first vector of the three power iterations that give the length of a step; None for equal parts.
    """
    top_XN1 = torch.maximum(z_XNL.amax(-1, keepdim=True), z_XNM.amax(-1, keepdim=True))
    x_XNM, y_XN1 = (z_XNM - top_XN1).exp(), (z_XNL - top_XN1).exp().sum(-1, keepdim=True)
    one_XM1 = torch.ones_like(x_XNM[..., 0, :, None])
    low, high = map(math.exp, bound)
    weight_XM1 = solve(x_XNM, y_XN1, one_XM1, ridge).clamp(low, high)
    if steps:
        way_XM1 = F.normalize(one_XM1 if power_start_M is None else one_XM1 * power_start_M[:, None], dim=-2)
        for _ in range(3):
            way_XM1 = F.normalize(x_XNM.mT @ (x_XNM @ way_XM1), dim=-2)
        size_X11 = (x_XNM @ way_XM1).square().sum(-2, keepdim=True).clamp(min=torch.finfo(z_XNL.dtype).tiny)
        for _ in range(steps):
            weight_XM1 = (weight_XM1 - x_XNM.mT @ (x_XNM @ weight_XM1 - y_XN1) / size_X11).clamp(low, high)
    return weight_XM1[..., 0].log()


def match_values(z_XNL: Tensor, z_XNM: Tensor, v_XLE: Tensor, start_XME: Tensor, ridge: float = 0.0) -> Tensor:
    """(X, M, E): values with which the slots, whose logits include their biases, have the output of all keys."""
    return solve(z_XNM.softmax(-1), z_XNL.softmax(-1) @ v_XLE, start_XME, ridge)
