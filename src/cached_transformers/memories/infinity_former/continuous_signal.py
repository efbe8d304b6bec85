"""A past of any length as a function on [0, 1], the sum of C Gaussian bumps: fit, contraction, attention.

The mathematics of the infinity-former (Martins et al. 2021, arXiv:2109.00301; github.com/deep-spin/infinite-former),
as pure functions. With bumps psi_c(t) = N(t; m_c, s_c^2) and vectors X at the points t of the signal:

    X~(t) = psi(t) B,   B = G^T X,   G = F^T (F F^T + penalty I)^-1,   F_cs = psi_c(t_s)          ridge regression
    E_p[psi_c] = N(mean; m_c, variance + s_c^2)   for p = N(mean, variance)                       continuous attention

Legend: B rows, H heads, N queries, C bumps, S points, T samples of the old signal, L new vectors, K bins, D width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cached_transformers.memories.parts.fifo_store import filled


class Bumps(NamedTuple):
    """Centres m and widths s of the bumps."""

    centre_C: Tensor
    width_C: Tensor


def bumps(count: int, widths: Sequence[float]) -> Bumps:
    """`count` bumps, one of each width at every centre; the centres are evenly spaced from 0 to 1. In float64."""
    if not widths or min(widths) <= 0:
        raise ValueError(f"widths={tuple(widths)} must be positive widths on a past of length 1, as (0.01, 0.05)")
    if count % len(widths) or count < 2 * len(widths):
        raise ValueError(
            f"basis={count} must be a multiple of the {len(widths)} widths {tuple(widths)}, and at least two of each"
        )
    centre_C = torch.linspace(0, 1, count // len(widths), dtype=torch.float64, device="cpu")
    width_C = torch.tensor(list(widths), dtype=torch.float64, device="cpu").repeat(len(centre_C))
    return Bumps(centre_C.repeat_interleave(len(widths)), width_C)


def density(points: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """N(points; mean, variance), by broadcasting."""
    each = variance.rsqrt()  # divisions and their gradients have twice the passes
    return torch.exp(-0.5 * ((points - mean) * each).square()) * (each * (2 * math.pi) ** -0.5)


def evaluate(points: Tensor, basis: Bumps) -> Tensor:
    """(..., C): psi at each of the points (...)."""
    apart = (points[..., None] - basis.centre_C) / basis.width_C
    # The limit keeps the exponential out of denormal numbers, which take seven times as long.
    return (-0.5 * apart.square()).clamp(min=-80).exp() / (basis.width_C * (2 * math.pi) ** 0.5)


def expectation(mean: Tensor, variance: Tensor, basis: Bumps) -> Tensor:
    """(..., C): mean of psi under the Gaussian of each query, over all reals; d/dtheta is a covariance of psi."""
    return density(mean[..., None], basis.centre_C, variance[..., None] + basis.width_C.square())


def ridge_operator(points_S: Tensor, basis: Bumps, penalty: float) -> Tensor:
    """(S, C): G, which turns vectors at these points into coefficients, B = G^T X. Float64: F F^T is near singular."""
    psi_SC = evaluate(points_S, basis)
    gram_CC = psi_SC.mT @ psi_SC + penalty * torch.eye(psi_SC.shape[1], dtype=psi_SC.dtype, device=psi_SC.device)
    return torch.cholesky_solve(psi_SC.mT, torch.linalg.cholesky(gram_CC)).mT


def first_operator(new: int, basis: Bumps, penalty: float) -> Tensor:
    """(L, C): fit of `new` vectors in the middles of equal parts of [0, 1]; on either side the signal is 0."""
    outside = new // 2
    points_S = (torch.arange(-outside, new + outside, dtype=torch.float64, device="cpu") + 0.5) / new
    return ridge_operator(points_S, basis, penalty)[outside : outside + new]


def update_operator(samples: int, new: int, contraction: float, basis: Bumps, penalty: float) -> Tensor:
    """(T + L, C): fit of samples of the old signal, moved into [0, contraction], and `new` vectors after them."""
    shift = 1 / (2 * new + samples)
    grid = torch.linspace(-0.5 + shift, 1.5 - shift, 2 * (samples + new), dtype=torch.float64, device="cpu")
    old_T = contraction * uniform_points(samples)
    new_L = contraction + (1 - contraction) * uniform_points(new)
    before, behind = grid[grid < 0], grid[grid > 1]
    operator_SC = ridge_operator(torch.cat([before, old_T, new_L, behind]), basis, penalty)
    return operator_SC[len(before) : len(before) + samples + new]


def uniform_points(count: int) -> Tensor:
    """1 / count, 2 / count, ..., 1, in float64."""
    return torch.arange(1, count + 1, dtype=torch.float64, device="cpu") / count


def attended_mass(mean_BHN: Tensor, variance_BHN: Tensor, counted_BN: Tensor, bins: int) -> Tensor:
    """(B, K): share of all attention in each of K equal parts of [0, 1]; equal shares where no query counts."""
    edges_K1 = torch.linspace(0, 1, bins + 1, dtype=mean_BHN.dtype, device=mean_BHN.device)
    below = torch.special.ndtr((edges_K1 - mean_BHN[..., None]) * variance_BHN[..., None].rsqrt())
    mass_BK = filled(below.diff(dim=-1), counted_BN[:, None]).sum((1, 2))
    total_B1 = mass_BK.sum(1, keepdim=True)
    return torch.where(total_B1 > 0, mass_BK / total_B1.clamp(min=torch.finfo(mass_BK.dtype).tiny), 1 / bins)


def quantile_points(mass_BK: Tensor, levels_T: Tensor) -> Tensor:
    """(B, T): where the share below reaches each level; inside a bin the share grows evenly."""
    bins = mass_BK.shape[1]
    below_BK1 = torch.cat([torch.zeros_like(mass_BK[:, :1]), mass_BK.cumsum(1)], 1)
    levels_BT = levels_T.to(mass_BK.dtype).expand(len(mass_BK), -1).contiguous()
    bin_BT = (torch.searchsorted(below_BK1, levels_BT) - 1).clamp(0, bins - 1)
    inside_BT = (levels_BT - below_BK1.gather(1, bin_BT)) / mass_BK.gather(1, bin_BT).clamp(min=1e-12)
    return (bin_BT + inside_BT.clamp(0, 1)) / bins


def random_points(mass_BK: Tensor, count: int) -> Tensor:
    """(B, T): left edges of bins drawn by their shares, in order."""
    return torch.multinomial(mass_BK, count, replacement=True).sort(1).values.to(mass_BK.dtype) / mass_BK.shape[1]


def divergence(mean: Tensor, variance: Tensor, prior_deviation: float, prior_mean: float | None = None) -> Tensor:
    """Kullback-Leibler divergence of N(mean, variance) from the prior; without a prior mean, the variance's part."""
    ratio = variance / prior_deviation**2
    apart = 0.0 if prior_mean is None else (mean - prior_mean).square() / prior_deviation**2
    return 0.5 * (ratio - ratio.log() - 1 + apart)
