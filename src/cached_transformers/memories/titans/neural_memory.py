"""The neural memory of Titans (Behrouz, Zhong and Mirrokni 2024, arXiv:2501.00663): small nets that learn as they read.

    S_t = eta_t S_(t-1) - theta_t grad l(M; k_t, v_t)         surprise, with momentum
    M_t = (1 - alpha_t) M_(t-1) + S_t                         forgetting
    y_t = M_t(q_t)                                            read after the token's own write

    l = |M(k) - v|^2 / 2;   M(x) = f(... f(x W_1) ...) W_L, each net with weights of its own, L layers

The gradient is taken at the weights with which a chunk of C tokens begins, x_j e_j^T for each matrix. So both
recurrences are linear in the chunk's initial state (`parts/fast_weights.py`):

    M_i = b_i M_0 + f_i S_0 - sum_j G_ij x_j e_j^T,           S_i = m_i S_0 - sum_j n_ij x_j e_j^T
    A = products of 1 - alpha,  N = products of eta,          P_ij = p_(j+1) ... p_i, the inverse of 1 - subdiagonal(p)
    n_ij = N_ij theta_j,  G = A n,  m_i = N_i1 eta_1,  f = A m,  b_i = A_i1 (1 - alpha_1)

Nothing divides by a gate, so that eta = 0, theta = 0 and alpha = 1 are what they say. A token that is not there
(padding, what fills up a chunk) has theta = alpha = 1 - eta = 0, and adds no S to M either: eta = 1 alone would let
momentum go on.

Omega and ATLAS (Behrouz et al. 2025, arXiv:2505.23735; no code published) take the gradient of the last c tokens at
every step, each with a share gamma_i, and ATLAS orthogonalises the sum by Newton-Schulz steps:

    Omega   S_t = eta_t S_(t-1) - theta_t sum_(t-c < i <= t) gamma_i grad l(M; k_i, v_i)
    ATLAS   S_t = eta_t S_(t-1) - sum_(t-c < i <= t) gamma_i grad l(M; k_i, v_i)
            M_t = (1 - alpha_t) M_(t-1) + theta_t NS(S_t)

All c gradients are at the weights with which the chunk begins, also those of tokens before the chunk: n = N theta K
gamma, K_sj = 1 for 0 <= s - j < c, and nothing else changes. NS is not linear in S: it acts at the end of a chunk, with
the mean theta of its tokens; until then a token reads the weights of the chunk's begin, reduced by forgetting.

Legend: B rows, G nets, N tokens, Q chunks, C tokens of a chunk, K width of keys, V of values, (I, O) of a matrix, P
numbers of a net; `...` any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from cached_transformers.attentions.parts.building_blocks import wide
from cached_transformers.memories.parts.fast_weights import (
    FastReading,
    FastWeights,
    Learned,
    Soup,
    Step,
    newton_schulz,
)

Activation = Literal["gelu", "silu"]
Loss = Literal["l2", "huber", "lp"]
NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 5
"""Coefficients of ATLAS' steps: those of Muon."""


class Gates(NamedTuple):
    """Gates per token and net, (B, G, N): theta, alpha, 1 - eta; and 1, or 0 for padding. All are 0 for padding."""

    theta_BGN: Tensor
    alpha_BGN: Tensor
    damping_BGN: Tensor
    there_BGN: Tensor


def chunks(t: Tensor, size: int, window: int = 1) -> Tensor:
    """(B, G, Q, window - 1 + size, ...) of (B, G, window - 1 + N, ...), the last chunk filled up with zeros."""
    missing = (window - 1 - t.shape[2]) % size
    if missing:
        t = torch.cat([t, t.new_zeros(*t.shape[:2], missing, *t.shape[3:])], 2)
    if window == 1:
        return t.unflatten(2, (-1, size))
    return t.unfold(2, window - 1 + size, size).movedim(-1, 3)


class Scan(NamedTuple):
    """By how much the state before a chunk and its gradients are in the state after each of its tokens (see above)."""

    b: Tensor
    f: Tensor
    G: Tensor
    m: Tensor
    n: Tensor


def products(p: Tensor) -> Tensor:
    """(..., C, C): p_(j+1) ... p_i at (i, j) of numbers (..., C); 1 on the diagonal, 0 above it."""
    one = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device).expand(*p.shape, -1)
    return torch.linalg.solve_triangular(
        one - torch.diag_embed(p[..., 1:], offset=-1), one, upper=False, unitriangular=True
    )


def scan_of(gates: Gates, shares: Tensor | None = None) -> Scan:
    """Coefficients of chunks (..., C); with shares gamma (..., c - 1 + C), of gradients from c - 1 tokens before on."""
    theta, alpha, damping, there = gates
    kept, eta = 1 - alpha, 1 - damping
    A, N = products(torch.stack([kept, eta]))
    m, n = N[..., :1] * eta[..., :1, None], N * theta[..., None, :]
    if shares is not None:
        window = shares.shape[-1] - n.shape[-1]
        n = n @ n.new_ones(n.shape[-1], shares.shape[-1]).triu().tril(window) * shares[..., None, :]
    summed = A * there[..., None, :]
    return Scan(A[..., :1] * kept[..., :1, None], summed @ m, summed @ n, m, n)


class NeuralMemory(FastWeights):
    """G nets for each row, which learn to give values for keys.

    Args:
        nets: G. width: K = V. layers: L, matrices of a net. expansion: width of the layers between, over K.
        chunk: C, tokens whose gradients are taken at the same weights. The first chunk begins with the first token of a
            call, the last one may be short: a stream that is cut at multiples of C gives the results of the whole.
        activation: f, between the matrices.
        loss: "l2", or "huber" (Yaad, arXiv:2504.13173): the length of an error counts up to `bound`, so that one odd
            value moves the weights no farther than others; or "lp" (Moneta, in the same paper): sum |error|^p / p.
        bound: of the error's length, as multiple of sqrt(V). power: p, at least 2. Steps grow with the error's power
            p - 1, so that no rate is small enough for all; the limit holds them.
        limit: ours: no matrix begins a chunk with a root mean square above it, whatever gates and inputs are. Weights
            that hold K values under independent keys have that of the values.
        window: c, tokens whose gradients each step takes. orthogonal: with Newton-Schulz steps, as ATLAS.

    The weights before the first token are parameters: the last matrix of each net is 0, so that it gives 0.
    """

    def __init__(
        self,
        nets: int,
        width: int,
        *,
        layers: int = 1,
        expansion: int = 4,
        chunk: int = 16,
        activation: Activation = "silu",
        loss: Loss = "l2",
        bound: float = 1.0,
        power: float = 3.0,
        limit: float = 10.0,
        window: int = 1,
        orthogonal: bool = False,
    ) -> None:
        shapes = list(pairwise([width, *[expansion * width] * (layers - 1), width]))
        first = [torch.randn(nets, i, o) / i**0.5 for i, o in shapes[:-1]]
        first.append(torch.zeros(nets, *shapes[-1]))
        initial_GP = torch.cat([t.flatten(1) for t in first], 1)
        super().__init__(shapes, initial_GP, activation=activation, chunk=chunk, limit=limit)
        self.loss, self.bound, self.power, self.window, self.orthogonal = loss, bound, power, window, orthogonal

    def error(self, given: Tensor, wanted: Tensor) -> Tensor:
        error = given - wanted
        if self.loss == "lp":
            return error.sign() * error.abs().pow(self.power - 1)
        if self.loss == "huber":
            bound = self.bound * wanted.shape[-1] ** 0.5
            error = error * bound * error.square().sum(-1, keepdim=True).clamp(min=bound**2).rsqrt()
        return error

    def move(self, end: Sequence[Tensor], step: Step) -> tuple[Tensor, Tensor]:
        """By b, f and m of the chunk's last token, and G and n from there; `orthogonal` by theta in the place of f."""
        (b, f, m), (W, S, (to_weights, to_sums), error) = end, step
        if self.orthogonal:
            S = torch.baddbmm(m * S, to_sums.mT, error)
            return torch.addcmul(f * newton_schulz(S, NEWTON_SCHULZ), b, W), S
        W, S = torch.addcmul(f * S, b, W), m * S
        return torch.baddbmm(W, to_weights.mT, error), torch.baddbmm(S, to_sums.mT, error)

    def follow(self, rule: Sequence[Any], begun: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """By 1 - alpha, eta, and theta as a tensor and a number."""
        (kept, eta, push, rate), (W, S, x, error) = rule, step
        S = torch.addcmul(S * eta, x.mT, error * push, value=-rate)
        return torch.addcmul(S, W, kept), S

    def forward(
        self,
        learned: Learned,
        q_BGNK: Tensor | None,
        k_BGNK: Tensor,
        v_BGNV: Tensor,
        gates: Gates,
        soup: Soup | None = None,
        shares_BGN: Tensor | None = None,
    ) -> tuple[Tensor | None, Learned]:
        """y (B, G, N, V), token t read after its own write, unless q is None; and the weights after the last token.

        Args:
            shares_BGN: gamma, with a window or `orthogonal`; these, keys and values then begin c - 1 tokens earlier.
        """
        tokens = gates.theta_BGN.shape[2]
        if tokens == 0:
            return q_BGNK, learned
        size = min(self.chunk, tokens)
        with torch.autocast(k_BGNK.device.type, enabled=False):
            chunked = Gates(*(chunks(wide(t), size) for t in gates))
            k, v = (chunks(wide(t), size, self.window) for t in (k_BGNK, v_BGNV))
            shares = None if shares_BGN is None else chunks(wide(shares_BGN), size, self.window)
            steps = chunked._replace(theta_BGN=chunked.there_BGN) if self.orthogonal else chunked
            scan = scan_of(steps, shares)
            q = None if q_BGNK is None else chunks(wide(q_BGNK), size)
            end = [t[..., -1:, :] for t in (scan.b, scan.f, scan.m)]
            rates = [t[..., -1, :, None] for t in (scan.G, scan.n)]
            if self.orthogonal:
                theta = chunked.theta_BGN.sum(-1) / chunked.there_BGN.sum(-1).clamp(min=1)
                end[1] = theta[..., None, None]
                scan = scan._replace(f=torch.zeros_like(scan.f), G=torch.zeros_like(scan.G))
            soup = soup and Soup(soup.matrices, chunks(soup.weights, size))
            out, after = self.through(learned, q, k, v, FastReading(scan.b, scan.f, scan.G), rates, end, soup)
            return (None if out is None else out.flatten(2, 3)[:, :, :tokens]), after
